"""A rank engine's messages without torch and threads: the real step scheduler over a fake device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from deepinfer.codec import pack, pack_codes, unpack
from deepinfer.kv_cache.cache_manager import CacheManager
from deepinfer.protocol import (
    DecodeBatch,
    DecodeResult,
    KVHandle,
    KVPlace,
    PrefillBatch,
    PrefilledRequest,
    PrefillResult,
    RankLoad,
    Request,
    RequestFailure,
)
from deepinfer.scheduler.step_plan import StepOutput, StepPlan
from deepinfer.scheduler.step_results import Decoded, Prefilled
from deepinfer.scheduler.step_scheduler import StepScheduler
from deepinfer.scheduler.stopping import StopChecker
from tests.support.fake_device import EOS, GROUPS, FakeDevice

Role = Literal["prefill", "decode"]


def stop_checkers(max_model_len: int) -> Callable[[Request], StopChecker]:
    """Return the factory of stop checkers that a step scheduler wants."""

    def make(request: Request) -> StopChecker:
        return StopChecker(
            request.sampling,
            eos_token_id=EOS,
            num_prompt_tokens=request.num_prompt_tokens,
            max_model_len=max_model_len,
            output_token_ids=unpack(request.output_token_ids).tolist(),
        )

    return make


class FakeRank:
    """One rank with up to two steps in flight: `post` a batch, `step` a few times, `take_results`."""

    def __init__(
        self,
        role: Role,
        rank: int,
        *,
        num_blocks: dict[str, int],
        num_slots: int,
        max_model_len: int,
        max_tokens_per_step: int = 16,
        max_rows_per_slot: int = 1,
        num_commits: Callable[[int], int] = lambda length: 1,
        fails: Callable[[int], bool] = lambda token_id: False,
        max_pieces: int = 0,
    ) -> None:
        self.role, self.rank = role, rank
        self.max_pieces = max_pieces  # a prefill rank holds so many hand-overs in its own memory
        self.pieces: dict[int, object] = {}
        self.num_pieces = 0
        self._dropped_tickets: set[int] = set()
        self._uses_device = False
        self.num_blocks, self.num_slots = num_blocks, num_slots
        self.wake_id = 0
        self.scheduler = StepScheduler(
            role=role,
            cache=CacheManager(GROUPS, num_blocks=num_blocks, num_slots=num_slots),
            max_running=num_slots - 1,
            max_tokens_per_step=max_tokens_per_step,
            max_model_len=max_model_len,
            make_stop_checker=stop_checkers(max_model_len),
            max_rows_per_slot=max_rows_per_slot,
        )
        self._device = FakeDevice(
            num_blocks=num_blocks,
            num_slots=num_slots,
            max_model_len=max_model_len,
            num_commits=num_commits,
            fails=fails,
        )
        self._in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        self._step_id = 0
        self._prefilled: list[PrefilledRequest] = []
        self._buffers: list[object] = []
        self._decoded: list[Decoded] = []
        self._failures: list[RequestFailure] = []

    def post(self, batch: PrefillBatch | DecodeBatch, buffers: Sequence[object] = ()) -> None:
        """Take a batch from the driver; `buffers` of all admitted requests."""
        assert batch.wake_id >= self.wake_id, "a wake id went back"
        self.wake_id = batch.wake_id
        if batch.drops_all:
            self.scheduler.abort_all()
        if isinstance(batch, PrefillBatch):
            self._follow_pieces(batch)
            for request in batch.requests:
                self.scheduler.add(request)
        else:
            for admitted, buffer in zip(batch.admitted, buffers, strict=True):
                self.scheduler.admit(admitted, buffer)
        self.scheduler.abort(unpack(batch.aborted_indexes).tolist())

    def _follow_pieces(self, batch: PrefillBatch) -> None:
        self._uses_device = batch.device_handover
        if batch.drops_all:
            self._dropped_tickets |= self.pieces.keys()
            self.pieces.clear()
        for ticket in unpack(batch.released).tolist():
            if ticket not in self._dropped_tickets:
                assert ticket in self.pieces, f"ticket {ticket} was released twice, or belongs to another life"
                del self.pieces[ticket]

    def step(self) -> None:
        """Launch one step, then take in the one before it; idle ranks only check their books."""
        if not self.scheduler.has_work():
            self.scheduler.check_integrity()
            return
        for entry in self.scheduler.next_imports():
            assert isinstance(entry.buffer, dict)
            self._device.scatter(entry.block_ids, entry.buffer)
        plan = self.scheduler.plan(self._step_id)
        self._step_id += 1
        self._in_flight.append((plan, self._device.run(plan)))
        if len(self._in_flight) == 2 or plan.is_idle:
            results = self.scheduler.apply(*self._in_flight.popleft())
            self._decoded.extend(results.decoded)
            self._failures.extend(results.failures)
            for prefilled in results.prefilled:
                self._publish(prefilled)
        self.scheduler.check_integrity()

    def take_results(self) -> tuple[PrefillResult | DecodeResult | None, list[object]]:
        """Return everything since the last call with its KV buffers; None when nothing is new."""
        if not (self._prefilled or self._decoded or self._failures):
            return None, []
        load = self.scheduler.load()
        rank_load = RankLoad(
            rank=self.rank,
            step_id=self._step_id,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_free_blocks=load.num_free_blocks,
        )
        failures, self._failures = tuple(self._failures), []
        if self.role == "prefill":
            items, self._prefilled = tuple(self._prefilled), []
            buffers, self._buffers = self._buffers, []
            return PrefillResult(rank=self.rank, items=items, failures=failures, load=rank_load), buffers
        decoded, self._decoded = self._decoded, []
        tokens = [np.array(entry.token_ids, np.int32) for entry in decoded]
        return (
            DecodeResult(
                rank=self.rank,
                step_id=self._step_id,
                sequence_indexes=pack([entry.index for entry in decoded]),
                num_tokens=pack([len(entry.token_ids) for entry in decoded]),
                token_ids=pack(np.concatenate(tokens)) if tokens else b"",
                finish_codes=pack_codes([entry.finish for entry in decoded]),
                num_drafted=pack([entry.num_drafted for entry in decoded]),
                num_accepted=pack([entry.num_accepted for entry in decoded]),
                failures=failures,
                load=rank_load,
            ),
            [],
        )

    def _publish(self, prefilled: Prefilled) -> None:
        request = prefilled.request
        handle = None
        if prefilled.needs_export:
            records, place = self._device.gather(prefilled.block_ids, prefilled.num_tokens), None
            if self._uses_device and len(self.pieces) < self.max_pieces:
                self.num_pieces += 1
                self.pieces[self.num_pieces] = records
                place = KVPlace(memory=b"", offset=0, ticket=self.num_pieces, sums=(0, 0))
            else:
                self._buffers.append(records)
            self.scheduler.exported(request.index)
            handle = KVHandle(
                request_id=request.request_id,
                source_rank=self.rank,
                num_tokens=prefilled.num_tokens,
                layout_digest="test",
                groups=(),
                nbytes=100 * prefilled.num_tokens,
                checksum=0,
                place=place,
            )
        self._prefilled.append(
            PrefilledRequest(
                request_id=request.request_id,
                index=request.index,
                first_token_ids=pack(prefilled.first_token_ids),
                finish_codes=pack_codes(prefilled.finish_codes),
                prompt_logprobs=prefilled.prompt_logprobs,
                kv=handle,
            )
        )
