"""A decode rank's sequences: placed when there is room, one run of rows in every step, preempted when blocks run out.

The device leads: a sequence is scheduled again while its last tokens are still in flight, so the host counts in upper
bounds (`max_rows_per_slot` tokens for each step in flight) and learns the truth when results arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from deepinfer.codec import unpack
from deepinfer.kv_cache.cache_manager import BlockRun, CacheManager
from deepinfer.protocol import AdmittedRequest, FinishCode, KVHandle, RequestFailure
from deepinfer.scheduler.logprob_columns import slice_logprobs
from deepinfer.scheduler.sequence import DecodeSequence, MakeStopChecker, known_tokens, token_limit
from deepinfer.scheduler.step_plan import BlockGrant, SlotAdmission, SlotOutput, StepOutput, StepPlan
from deepinfer.scheduler.step_results import Decoded, KVImport, SchedulerLoad, StepResults


class DecodeLane:
    """Sequences with lower indexes are older: they get blocks first, and the newest one is preempted."""

    def __init__(
        self,
        *,
        cache: CacheManager,
        max_running: int,
        max_model_len: int,
        max_rows_per_slot: int,
        make_stop_checker: MakeStopChecker,
    ) -> None:
        """See `StepScheduler`."""
        self._cache = cache
        self._max_running = max_running
        self._max_model_len = max_model_len
        self._max_rows_per_slot = max_rows_per_slot
        self._make_stop_checker = make_stop_checker
        self._waiting: deque[tuple[DecodeSequence, KVHandle, object]] = deque()
        self._running: dict[int, DecodeSequence] = {}  # every sequence with a slot
        self._by_slot: dict[int, DecodeSequence] = {}
        self._placed: dict[int, tuple[BlockRun, ...]] = {}  # placed since the last plan
        self._is_short_of_blocks = False
        self._decoded: list[Decoded] = []
        self._failures: list[RequestFailure] = []
        self._without_rules: list[str] = []

    def admit(self, admitted: AdmittedRequest, buffer: object, grammar: object | None) -> None:
        """Queue the sequences of `admitted`; one that can never run fails with the next results."""
        request = admitted.request
        earlier = known_tokens(request)
        offsets, first_token_ids = unpack(admitted.sample_offsets).tolist(), unpack(admitted.first_token_ids)
        for offset, first in zip(offsets, first_token_ids, strict=True):
            sample = request.first_sample + offset
            checker = self._make_stop_checker(request)
            code = checker.check((int(first),)).code
            assert code is FinishCode.NONE, f"sequence {request.index + offset} ended with its first token: {code!r}"
            token_ids = np.append(earlier, first)
            limit = token_limit(request, self._max_model_len)
            index = request.index + offset
            sequence = DecodeSequence(
                index, request, sample, token_ids, len(token_ids), limit, checker, grammar=grammar
            )
            if self._cache.fits_alone(self._num_cached_after_next(sequence)):
                self._waiting.append((sequence, admitted.kv, buffer))
            else:
                self._fail(
                    sequence, "cache_too_small", f"the cache of a decode rank can't hold {len(token_ids)} tokens"
                )

    def abort(self, indexes: Iterable[int]) -> None:
        """Drop sequences without a result; unknown indexes are left alone."""
        wanted = set(indexes)
        if any(entry[0].index in wanted for entry in self._waiting):
            self._waiting = deque(entry for entry in self._waiting if entry[0].index not in wanted)
        for index in wanted & self._running.keys():
            self._end(self._running[index])

    def indexes(self) -> set[int]:
        """Return the indexes of all sequences here."""
        return {entry[0].index for entry in self._waiting} | self._running.keys()

    def fail(self, index: int, kind: str, text: str) -> None:
        """End a placed sequence with an error."""
        sequence = self._running.get(index)
        if sequence is not None and (sequence.is_preempted or not sequence.is_ending):
            self._fail(sequence, kind, text)
            self._end(sequence)

    def index_in(self, slot: int) -> int:
        """Return the index of the sequence that has `slot`."""
        return self._by_slot[slot].index

    def has_work(self) -> bool:
        """True while anything waits, runs, drains, or is to be reported."""
        return bool(self._waiting or self._running or self._decoded or self._failures)

    def load(self) -> SchedulerLoad:
        """Return the present counts."""
        return SchedulerLoad(len(self._waiting), len(self._running), self._cache.num_free_blocks())

    def next_imports(self) -> list[KVImport]:
        """Place waiting sequences, first come first served, while slots and blocks are free.

        One free block is left for each running sequence, and nothing is placed after a plan in which one of them
        found no block: they come first.
        """
        imports = []
        num_running = sum(not sequence.is_ending for sequence in self._running.values())
        while self._waiting and num_running < self._max_running and not self._is_short_of_blocks:
            sequence, handle, buffer = self._waiting[0]
            num_tokens = self._num_cached_after_next(sequence)
            reservation = self._cache.reserve(sequence.index, num_tokens, num_spare_blocks=len(self._running))
            if reservation is None:
                break
            self._waiting.popleft()
            num_running += 1
            sequence.slot = reservation.slot
            self._running[sequence.index] = self._by_slot[sequence.slot] = sequence
            self._placed[sequence.index] = reservation.runs
            block_ids = self._cache.block_table(sequence.index, handle.num_tokens)
            imports.append(KVImport(sequence.index, sequence.slot, block_ids, handle.num_tokens, handle, buffer))
        return imports

    def plan(self, step_id: int) -> StepPlan:
        """Give every sequence that may go on its rows, oldest first."""
        self._is_short_of_blocks = False
        slots: list[int] = []
        grants: list[BlockGrant] = []
        admissions: list[SlotAdmission] = []
        for sequence in sorted(self._running.values(), key=lambda sequence: sequence.index):
            runs = self._find_blocks(sequence) if sequence.wants_a_row else None
            if runs is None:
                continue
            if sequence.index in self._placed:
                runs = self._placed.pop(sequence.index) + runs
                admissions.append(_admission(sequence))
            grants.extend(BlockGrant(sequence.slot, run.group, run.first_index, run.block_ids) for run in runs)
            slots.append(sequence.slot)
            sequence.num_in_flight += 1
        return StepPlan(
            step_id,
            admissions=tuple(admissions),
            grants=tuple(grants),
            decode_slots=np.array(slots, np.int32),
            max_rows_per_slot=self._max_rows_per_slot,
        )

    def apply(self, plan: StepPlan, output: StepOutput) -> StepResults:
        """Take the results of the oldest step in flight."""
        for slot, result in zip(plan.decode_slots.tolist(), output.slots, strict=True):
            assert result.slot == slot, f"output of slot {result.slot} stands at slot {slot}"
            sequence = self._by_slot[slot]
            sequence.num_in_flight -= 1
            if sequence.is_preempted or not sequence.is_ending:
                self._take(sequence, result)
            if sequence.is_ending and sequence.num_in_flight == 0:
                self._release(sequence)
        decoded, self._decoded = tuple(self._decoded), []
        failures, self._failures = tuple(self._failures), []
        without_rules, self._without_rules = tuple(self._without_rules), []
        return StepResults(plan.step_id, decoded=decoded, failures=failures, without_rules=without_rules)

    def _take(self, sequence: DecodeSequence, result: SlotOutput) -> None:
        if result.failure is not None:
            self._fail(sequence, "numerical_error", result.failure)
            sequence.is_ending = True
            return
        assert 1 <= len(result.token_ids) <= self._max_rows_per_slot, f"{len(result.token_ids)} tokens in a step"
        num_kept, code = sequence.checker.check(result.token_ids.tolist())
        sequence.num_tokens += num_kept
        if code is not FinishCode.NONE:
            sequence.is_preempted = False
            sequence.is_ending = True
        elif sequence.is_preempted and sequence.num_in_flight == 0:
            code = FinishCode.PREEMPTED
        assert code is not FinishCode.NONE or sequence.num_tokens < sequence.limit, f"{sequence.index} beyond its limit"
        num_fell_back = result.num_fell_back(num_kept)
        if num_fell_back and not sequence.fell_back:
            sequence.fell_back = True
            self._without_rules.append(sequence.request.request_id)
        self._decoded.append(
            Decoded(
                index=sequence.index,
                token_ids=tuple(result.token_ids[:num_kept].tolist()),
                finish=code,
                logprobs=None if result.logprobs is None else slice_logprobs(result.logprobs, 0, num_kept),
                num_drafted=result.num_drafted,
                num_accepted=min(result.num_accepted, num_kept),
                num_fell_back=num_fell_back,
            )
        )

    def _find_blocks(self, sequence: DecodeSequence) -> tuple[BlockRun, ...] | None:
        """Return the blocks for one more step of `sequence`, or None when it has to sit this step out."""
        num_tokens = self._num_cached_after_next(sequence)
        runs = self._cache.grow(sequence.index, num_tokens)
        if runs is None and self._trim_all():
            runs = self._cache.grow(sequence.index, num_tokens)
        while runs is None:
            self._is_short_of_blocks = True
            if any(other.is_ending for other in self._running.values()):
                return None  # blocks come back when its last step has been applied
            victim = max(self._running.values(), key=lambda other: other.index)
            if victim is sequence and len(self._running) == 1:
                if sequence.num_in_flight:
                    return None  # its results may show that it needs less
                text = f"the cache of a decode rank can't hold {num_tokens} tokens; raise cache.memory_bytes"
                self.fail(sequence.index, "cache_too_small", text)
                return None
            self._preempt(victim)
            if victim is sequence:
                return None
            runs = self._cache.grow(sequence.index, num_tokens)
        return runs

    def _trim_all(self) -> bool:
        """Take back what was reserved for tokens that turned out not to come; True when it was anything.

        The device may be further than the host says with a sequence that was cut at its end: those keep all.
        """
        num_taken = sum(
            self._cache.trim(other.index, other.num_cached_after(other.num_in_flight, self._max_rows_per_slot))
            for other in self._running.values()
            if not other.is_ending and other.index not in self._placed
        )
        return num_taken > 0

    def _preempt(self, sequence: DecodeSequence) -> None:
        sequence.is_preempted = True
        if sequence.num_in_flight == 0:
            self._decoded.append(Decoded(sequence.index, (), FinishCode.PREEMPTED))
        self._end(sequence)

    def _end(self, sequence: DecodeSequence) -> None:
        sequence.is_ending = True
        if sequence.num_in_flight == 0:
            self._release(sequence)

    def _fail(self, sequence: DecodeSequence, kind: str, text: str) -> None:
        sequence.is_preempted = False
        self._failures.append(
            RequestFailure(request_id=sequence.request.request_id, index=sequence.index, kind=kind, text=text)
        )

    def _release(self, sequence: DecodeSequence) -> None:
        self._cache.release(sequence.index)
        self._placed.pop(sequence.index, None)
        del self._running[sequence.index], self._by_slot[sequence.slot]

    def _num_cached_after_next(self, sequence: DecodeSequence) -> int:
        return sequence.num_cached_after(sequence.num_in_flight + 1, self._max_rows_per_slot)


def _admission(sequence: DecodeSequence) -> SlotAdmission:
    request = sequence.request
    return SlotAdmission(
        slot=sequence.slot,
        token_ids=sequence.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        first_sample=sequence.sample,
        grammar=sequence.grammar,
    )
