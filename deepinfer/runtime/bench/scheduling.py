"""What scheduling costs on the host: a decode rank's plans, and the driver with ranks that answer at once. No model."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from deepinfer.codec import pack, pack_codes
from deepinfer.config import SchedulerConfig
from deepinfer.kv_cache.cache_manager import CacheManager
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.protocol import (
    DecodeBatch,
    DecodeResult,
    FinishCode,
    PrefillBatch,
    PrefilledRequest,
    PrefillResult,
    RankLoad,
    Request,
)
from deepinfer.runtime.bench.requests import decode_batch, empty_handover, made_up_requests
from deepinfer.scheduler.batch_scheduler import BatchScheduler, OutgoingBatch
from deepinfer.scheduler.load_balancer import DecodeCapacity
from deepinfer.scheduler.step_plan import SlotOutput, StepOutput, StepPlan
from deepinfer.scheduler.step_scheduler import StepScheduler
from deepinfer.scheduler.stopping import StopChecker

_BLOCK: Final = 64
_VOCAB_SIZE: Final = 1000
_PROMPT: Final = 128
_GROUP: Final = KVGroup("global", "paged", _BLOCK, 1024, prefix_cacheable=True, wire_format="none")
_JOB: Final = "bench"
_ROUND_TOKENS: Final = 8  # that a sequence gains between two results of its rank


@dataclass(slots=True, frozen=True)
class DriverCost:
    """CPU seconds of the driver's scheduler for a whole job, which took `num_rounds` results of every rank."""

    seconds: float
    num_requests: int
    num_tokens: int
    num_rounds: int


def rank_step_seconds(num_sequences: int, *, context: int, rows_per_slot: int, num_steps: int) -> float:
    """Return the median CPU seconds that a decode rank's scheduler takes for a step: the plan, and the results of one.

    Every sequence commits `rows_per_slot` tokens a step. One step is in flight, as in an engine.
    """
    longest = context + (num_steps + 2) * rows_per_slot + 1
    blocks = 1 + num_sequences * (_GROUP.num_blocks_for(longest) + 1)
    scheduler = StepScheduler(
        role="decode",
        cache=CacheManager((_GROUP,), num_blocks={_GROUP.name: blocks}, num_slots=num_sequences + 1),
        max_running=num_sequences,
        max_tokens_per_step=1,
        max_model_len=longest,
        make_stop_checker=partial(_make_checker, longest=longest),
        max_rows_per_slot=rows_per_slot,
    )
    batch = decode_batch(
        num_sequences, num_tokens=context, max_tokens=longest - context, vocab_size=_VOCAB_SIZE, layout_digest=""
    )
    for admitted in batch.admitted:
        scheduler.admit(admitted, None)
    scheduler.next_imports()
    last, seconds = scheduler.plan(0), []
    for step in range(1, num_steps + 1):
        output = _output(last, rows_per_slot)
        begin = time.thread_time()
        plan = scheduler.plan(step)
        scheduler.apply(last, output)
        seconds.append(time.thread_time() - begin)
        last = plan
    return statistics.median(seconds)


def driver_cost(
    num_requests: int, *, prefill_ranks: int, decode_ranks: int, max_running: int, max_tokens: int
) -> DriverCost:
    """Run a job of short prompts with `max_tokens` tokens each through the driver's scheduler, with simulated ranks.

    A rank has done all it was given by the next round, and reports eight tokens more of each sequence every round.
    Counted is the scheduler alone: not Ray, not the ranks, not the making of requests.
    """
    blocks = max_running * _GROUP.num_blocks_for(_PROMPT + max_tokens) + 1
    scheduler = BatchScheduler(
        config=SchedulerConfig(max_in_flight=2 * decode_ranks * max_running),
        prefill_ranks=range(prefill_ranks),
        decode_ranks=[DecodeCapacity(rank, {_GROUP.name: blocks}, max_running + 1) for rank in range(decode_ranks)],
        groups=(_GROUP,),
        draw_seed=lambda: 1,
    )
    ranks = [_SimulatedRank(rank, max_tokens) for rank in range(decode_ranks)]
    requests = made_up_requests(num_requests, _PROMPT, max_tokens, _VOCAB_SIZE)
    seconds, num_done, num_rounds = 0.0, 0, 0
    prefilled: list[PrefillResult] = []
    while num_done < num_requests:
        new = list(itertools.islice(requests, scheduler.capacity(_JOB)))
        decoded = [news for rank in ranks if (news := rank.step()) is not None]
        begin = time.thread_time()
        batches, ended = _round(scheduler, new, prefilled, decoded)
        seconds += time.thread_time() - begin
        num_done += ended
        num_rounds += 1
        prefilled = [_prefilled(sent.rank, sent.batch) for sent in batches if isinstance(sent.batch, PrefillBatch)]
        for sent in batches:
            if isinstance(sent.batch, DecodeBatch):
                ranks[sent.rank].admit(sent.batch)
    return DriverCost(seconds, num_requests, num_requests * max_tokens, num_rounds)


def _round(
    scheduler: BatchScheduler, new: list[Request], prefilled: list[PrefillResult], decoded: list[DecodeResult]
) -> tuple[list[OutgoingBatch], int]:
    """What a driver does in a turn of its loop; returns what to send, and how many sequences have ended."""
    for request in new:
        scheduler.submit(_JOB, request)
    for result in prefilled:
        scheduler.on_prefill_result(result.rank, result, [None] * len(result.items))
    for news in decoded:
        scheduler.on_decode_result(news.rank, news)
    outputs = scheduler.take_outputs(_JOB)
    return scheduler.next_batches(), sum(output.finish is not FinishCode.NONE for output in outputs)


class _SimulatedRank:
    """A decode rank that gives every sequence eight tokens a round, until it has `max_tokens`."""

    def __init__(self, rank: int, max_tokens: int) -> None:
        self._rank, self._max_tokens = rank, max_tokens
        self._missing: dict[int, int] = {}  # tokens, by sequence

    def admit(self, batch: DecodeBatch) -> None:
        """Take sequences, which have their first token."""
        for admitted in batch.admitted:
            self._missing[admitted.request.index] = self._max_tokens - 1

    def step(self) -> DecodeResult | None:
        """Return the news of a round; None if nothing runs."""
        if not self._missing:
            return None
        counts = {index: min(_ROUND_TOKENS, missing) for index, missing in self._missing.items()}
        ended = {index for index, count in counts.items() if count == self._missing[index]}
        self._missing = {i: missing - counts[i] for i, missing in self._missing.items() if i not in ended}
        return DecodeResult(
            rank=self._rank,
            step_id=0,
            sequence_indexes=pack(list(counts)),
            num_tokens=pack(list(counts.values())),
            token_ids=pack(np.ones(sum(counts.values()), np.int32)),
            finish_codes=pack_codes([FinishCode.LENGTH if index in ended else FinishCode.NONE for index in counts]),
            load=RankLoad(rank=self._rank, num_running=len(self._missing), num_free_blocks={_GROUP.name: 1 << 30}),
        )


def _prefilled(rank: int, batch: PrefillBatch) -> PrefillResult:
    items = tuple(
        PrefilledRequest(
            request_id=request.request_id,
            index=request.index,
            first_token_ids=pack([1] * request.num_samples),
            finish_codes=pack_codes([FinishCode.NONE] * request.num_samples),
            kv=empty_handover(request, ""),
        )
        for request in batch.requests
    )
    return PrefillResult(rank=rank, items=items, load=RankLoad(rank=rank))


def _output(plan: StepPlan, num_tokens: int) -> StepOutput:
    token_ids = np.ones(num_tokens, np.int32)
    return StepOutput(plan.step_id, slots=tuple(SlotOutput(slot, token_ids) for slot in plan.decode_slots.tolist()))


def _make_checker(request: Request, *, longest: int) -> StopChecker:
    return StopChecker(
        request.sampling, eos_token_id=0, num_prompt_tokens=request.num_prompt_tokens, max_model_len=longest
    )
