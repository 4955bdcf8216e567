"""A rank's view of its work, as far as the host knows it: prompts being prefilled and sequences being decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from deepinfer.codec import unpack
from deepinfer.protocol import LogprobColumns, Request
from deepinfer.scheduler.step_plan import Int32Array
from deepinfer.scheduler.stopping import StopChecker

MakeStopChecker = Callable[[Request], StopChecker]  # for one sequence; the earlier output of a replay counts


def known_tokens(request: Request) -> Int32Array:
    """Return the prompt and, behind it, the earlier output of a replayed request."""
    return np.concatenate((unpack(request.prompt_token_ids), unpack(request.output_token_ids)))


def token_limit(request: Request, max_model_len: int) -> int:
    """Return the number of tokens, prompt included, at which a sequence ends at the latest."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)


@dataclass(slots=True)
class PrefillTask:
    """A prompt (or prompt and earlier output) on a prefill rank; `slot` 0 while it waits.

    `num_scheduled` tokens stand in planned steps; `num_in_flight` of those steps have not been applied yet. A
    `dropped` task only waits for them. `is_exporting`: finished, its KV is being gathered.
    """

    request: Request
    token_ids: Int32Array
    slot: int = 0
    num_scheduled: int = 0
    num_in_flight: int = 0
    dropped: bool = False
    is_exporting: bool = False
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
    grammar: object | None = None

    @property
    def num_remaining(self) -> int:
        """Tokens that no planned step contains."""
        return len(self.token_ids) - self.num_scheduled


@dataclass(slots=True)
class DecodeSequence:
    """One sequence on a decode rank; `slot` 0 while it waits.

    `num_tokens`: prompt and output tokens whose values the host knows; each of the `num_in_flight` steps adds 1 to
    `max_rows_per_slot` more. `limit`: the sequence ends at this number of tokens at the latest. When `is_ending`
    nothing is scheduled any more and slot and blocks go back after the last step in flight; `is_preempted` says that
    the results of those steps still count. `fell_back`: a token was drawn without the request's rules.
    """

    index: int
    request: Request
    sample: int
    token_ids: Int32Array
    num_tokens: int
    limit: int
    checker: StopChecker
    slot: int = 0
    num_in_flight: int = 0
    is_ending: bool = False
    is_preempted: bool = False
    fell_back: bool = False
    grammar: object | None = None

    @property
    def wants_a_row(self) -> bool:
        """False once it ends, or is sure to end with the steps in flight."""
        return not self.is_ending and self.num_tokens + self.num_in_flight < self.limit

    def num_cached_after(self, num_steps: int, max_rows_per_slot: int) -> int:
        """Most tokens that can have their KV in the cache after `num_steps` steps more than the results known.

        Rows beyond the limit need no blocks of their own: what they produce is cut off.
        """
        return min(self.num_tokens - 1 + num_steps * max_rows_per_slot, self.limit - 1)
