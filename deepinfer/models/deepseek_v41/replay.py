"""Bounded replay: of a prompt, only the last tokens run through the decoder's layers.

The layers behind the last KV source own nothing that later positions read but their window keys. So a prompt's row
that lies before its replay start leaves its keys at that source and goes no further. The start follows from the number
of prompt tokens alone, which is known when the first row runs: neither chunks nor other sequences can move it, no
stream has to be kept from one chunk to the next, and a sequence that is run again with its output starts where it
started before. What a window of the layers behind would see before the start is left out, which is the approximation
that the released model was trained with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.caches import MAX_UNDONE_TOKENS
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.step_rows import StepRows
from deepinfer.models.model_spec import ForwardInputs, Prompts


@dataclass(slots=True, frozen=True)
class Cut:
    """The first decoder layer writes keys of all T rows; `kept` [K], ascending, are the ones that go on from there.

    `queries`: index lists of the kept rows in that layer, where windows are whole; `behind`: in the layers behind it.
    `logit_rows` [L]: the wanted rows among the kept ones.
    """

    kept: Tensor
    queries: StepRows
    behind: StepRows
    logit_rows: Tensor


def replay_starts(prompts: Prompts, *, keep_tokens: int) -> Tensor:
    """Return int64 [B]: the first position of each sequence that runs through every layer.

    0 where the logits of prompt rows are wanted: those need the whole depth.
    """
    return torch.where(prompts.wants_logits, 0, (prompts.num_tokens - keep_tokens).clamp_min(0))


def keep_rows(inputs: ForwardInputs, starts: Tensor) -> tuple[Tensor, ForwardInputs]:
    """Return the row numbers [K] from `starts` [B] on, without padding, and the step as if it had no other rows."""
    sequence = inputs.row_sequence
    kept = torch.nonzero((inputs.positions >= starts[sequence]) & ~inputs.is_padding).squeeze(1)
    assert torch.isin(inputs.logit_rows, kept).all(), "logits are wanted of a row that stops before the last layer"
    places = torch.searchsorted(kept, inputs.logit_rows)
    sequence = sequence[kept]
    numbers = torch.arange(len(inputs.sequence_starts), device=kept.device)
    return kept, dataclasses.replace(
        inputs,
        token_ids=inputs.token_ids[kept],
        positions=inputs.positions[kept],
        row_sequence=sequence,
        sequence_starts=torch.searchsorted(sequence, numbers),
        logit_rows=places,
        is_padding=inputs.is_padding[kept],
    )


def cut_rows(rows: StepRows, behind: StepRows, kept: Tensor, logit_rows: Tensor) -> Cut:
    """Return the cut from the index lists of all rows and of the kept ones."""
    queries = dataclasses.replace(behind, window_rows=rows.window_rows[kept])
    return Cut(kept=kept, queries=queries, behind=behind, logit_rows=logit_rows)


def prompt_keep_tokens(config: ModelConfig, wanted: int | None, *, max_draft_tokens: int) -> int:
    """Return how many tokens of a prompt run through every layer; `wanted` None: window + 12.

    Two steps may be in flight, each with one token and its drafts, and all of them may be undone: the windows behind
    must still be whole then. Raises ConfigError below that.
    """
    smallest = config.sliding_window + 2 * (1 + max_draft_tokens)
    if wanted is not None and wanted < smallest:
        raise ConfigError(
            f"{wanted} tokens are too few: the window of {config.sliding_window} and two steps of "
            f"1 + {max_draft_tokens} tokens need {smallest}; raise it or leave it out",
            path="model.prefill_keep_tokens",
        )
    return wanted if wanted is not None else config.sliding_window + MAX_UNDONE_TOKENS
