"""The contract between a rank's scheduler and its runtime: what one step runs, and what came back.

The device leads and the host follows: a plan names slots and budgets, never positions of rows whose sequence is still
in flight. Slot 0 and block 0 exist for padding rows only and are never handed out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.protocol import LogprobColumns, SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True, frozen=True)
class SlotAdmission:
    """A sequence takes a slot of the device's table before the step runs.

    `token_ids` [num_tokens] are all tokens known so far: the prompt and, behind it, output tokens. On a decode rank
    the last of them is the first row to run. `num_prompt_tokens` divides prompt and output. `num_samples` is 1 except
    on a prefill rank, whose one sequence draws the first token of `num_samples` sequences from `first_sample` on.
    `grammar` is what the runtime made of the request's grammar.
    """

    slot: int
    token_ids: Int32Array
    num_prompt_tokens: int
    sampling: SamplingParams
    first_sample: int = 0
    num_samples: int = 1
    grammar: object | None = None


@dataclass(slots=True, frozen=True)
class PrefillChunk:
    """Rows `start_position .. start_position + num_tokens - 1` of the tokens in `slot`; the last chunk `samples`."""

    slot: int
    start_position: int
    num_tokens: int
    samples: bool


@dataclass(slots=True, frozen=True)
class BlockGrant:
    """`block_ids` continue the block table of `slot` in the paged group `group` from entry `first_index` on."""

    slot: int
    group: str
    first_index: int
    block_ids: Int32Array


@dataclass(slots=True, frozen=True)
class DraftBudget:
    """How many drafts a step verifies: `num_drafts` for each slot or, with `total`, that many over all slots.

    With `total` the device takes the drafts that are most likely to survive; `temperatures` [K] divide the log-odds
    of draft k.
    """

    num_drafts: int
    total: int | None = None
    temperatures: tuple[float, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One step of one rank. Applied in this order: admissions, grants, rows.

    `decode_slots` [n]: slots that run their uncommitted rows (1 + drafts, at most `max_rows_per_slot` each; fewer where
    `draft_budget` says so). A slot that the device knows to be at its limit runs none, and its output is empty.
    `is_drafting`: the step drafts for the next one, on all ranks of a group or on none.
    """

    step_id: int
    admissions: tuple[SlotAdmission, ...] = ()
    grants: tuple[BlockGrant, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    decode_slots: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    max_rows_per_slot: int = 1
    draft_budget: DraftBudget | None = None
    is_drafting: bool = True

    @property
    def num_rows(self) -> int:
        """Upper bound of the rows of this step; without any, a padding row runs."""
        return sum(chunk.num_tokens for chunk in self.chunks) + len(self.decode_slots) * self.max_rows_per_slot

    @property
    def is_idle(self) -> bool:
        """True when the step has only a padding row."""
        return not self.chunks and len(self.decode_slots) == 0


@dataclass(slots=True)
class SlotOutput:
    """What one slot got from a step: `token_ids` [n], n >= 1; for a sampling chunk one per sample.

    Of a decode slot's n tokens the first n - 1 = `num_accepted` were drafts, of `num_drafted` that were verified; n = 0
    only if the sequence was at its limit before. `failure` is set when the row's numbers were unusable (NaN logits):
    then `token_ids` is empty. `fell_back` [n]: the request's own rules had left no id for that token, so that it was
    drawn without them; None where there are no rules.
    """

    slot: int
    token_ids: Int32Array
    logprobs: LogprobColumns | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    failure: str | None = None
    fell_back: BoolArray | None = None

    def num_fell_back(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens were drawn without the request's rules."""
        return 0 if self.fell_back is None else int(self.fell_back[:num_tokens].sum())


@dataclass(slots=True)
class StepOutput:
    """Results of one step on the host: sampling chunks in plan order, then the decode slots in plan order.

    `prompt_logprobs` holds, per slot, the columns of this step's chunk rows: entry t belongs to the prompt token at
    `start_position + 1 + t`. `draft_ids` [n, K] are the drafts for the next step of the n decode slots, in plan order,
    None where the step drafts nothing; `confidence` [n, K] their log-odds, None also where nobody plans with them.
    """

    step_id: int
    slots: tuple[SlotOutput, ...] = ()
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    draft_ids: Int32Array | None = None
    confidence: Float32Array | None = None
    device_seconds: float = 0.0
