"""What a step scheduler hands to its rank engine beside plans: imports to run, and results to publish."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.protocol import FinishCode, KVHandle, LogprobColumns, Request, RequestFailure
from deepinfer.scheduler.step_plan import Int32Array


@dataclass(slots=True, frozen=True)
class KVImport:
    """A sequence was placed: scatter `buffer` into its slot and blocks before the next plan runs.

    `block_ids` per paged group cover exactly the `num_tokens` tokens whose KV the buffer holds.
    """

    index: int
    slot: int
    block_ids: dict[str, Int32Array]
    num_tokens: int
    handle: KVHandle
    buffer: object


@dataclass(slots=True, frozen=True)
class Prefilled:
    """A finished prefill. Sample i drew `first_token_ids[i]`, which ends it when `finish_codes[i]` is not `NONE`.

    `num_fell_back` of them were drawn without the request's rules (see `SlotOutput`). `num_tokens` tokens have their KV
    in `slot` and `block_ids`. With `needs_export` both stay taken until
    `StepScheduler.exported(request.index)`; without it they are free already.
    """

    request: Request
    first_token_ids: tuple[int, ...]
    finish_codes: tuple[FinishCode, ...]
    first_logprobs: LogprobColumns | None
    prompt_logprobs: LogprobColumns | None
    slot: int
    block_ids: dict[str, Int32Array]
    num_tokens: int
    needs_export: bool
    num_fell_back: int = 0


@dataclass(slots=True, frozen=True)
class Decoded:
    """What a sequence gained in a step, cut where it ended; no tokens only with `PREEMPTED`.

    `num_fell_back` of its tokens were drawn without the request's rules (see `SlotOutput`).
    """

    index: int
    token_ids: tuple[int, ...]
    finish: FinishCode
    logprobs: LogprobColumns | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_fell_back: int = 0


@dataclass(slots=True, frozen=True)
class StepResults:
    """News to publish after a step. A failed request or sequence stands in `failures` alone.

    `without_rules`: ids of requests of which a sequence now got its first token here that was drawn without them.
    """

    step_id: int
    prefilled: tuple[Prefilled, ...] = ()
    decoded: tuple[Decoded, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    without_rules: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class SchedulerLoad:
    """The scheduler's part of a `RankLoad`."""

    num_waiting: int
    num_running: int
    num_free_blocks: dict[str, int]
