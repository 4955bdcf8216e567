"""A prefill rank's queue: prompts in order of arrival, cut into chunks that fill the token budget of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepinfer.kv_cache.cache_manager import CacheManager
from deepinfer.protocol import FinishCode, LogprobColumns, Request, RequestFailure
from deepinfer.scheduler.logprob_columns import prompt_columns
from deepinfer.scheduler.sequence import MakeStopChecker, PrefillTask, known_tokens
from deepinfer.scheduler.step_plan import BlockGrant, PrefillChunk, SlotAdmission, SlotOutput, StepOutput, StepPlan
from deepinfer.scheduler.step_results import Prefilled, SchedulerLoad, StepResults


class PrefillLane:
    """First come, first served. A prompt gets all its blocks when it starts, so nothing is ever preempted here."""

    def __init__(
        self,
        *,
        cache: CacheManager,
        max_running: int,
        max_tokens_per_step: int,
        max_model_len: int,
        make_stop_checker: MakeStopChecker,
    ) -> None:
        """See `StepScheduler`."""
        self._cache = cache
        self._max_running = max_running
        self._max_tokens_per_step = max_tokens_per_step
        self._max_model_len = max_model_len
        self._make_stop_checker = make_stop_checker
        self._waiting: deque[PrefillTask] = deque()
        self._running: dict[int, PrefillTask] = {}  # by index, in order of start; every task with a slot
        self._by_slot: dict[int, PrefillTask] = {}
        self._failures: list[RequestFailure] = []

    def add(self, request: Request, grammar: object | None) -> None:
        """Queue a request; one that can never run fails with the next results."""
        task = PrefillTask(request, known_tokens(request), grammar=grammar)
        num_tokens = len(task.token_ids)
        if num_tokens >= self._max_model_len:
            text = f"{num_tokens} tokens leave no room for output: the context limit is {self._max_model_len}"
            self._failures.append(_failure(request, "context_length_exceeded", text))
        elif not self._cache.fits_alone(num_tokens):
            text = f"the cache of a prefill rank can't hold {num_tokens} tokens; raise cache.memory_bytes"
            self._failures.append(_failure(request, "cache_too_small", text))
        else:
            self._waiting.append(task)

    def abort(self, indexes: Iterable[int]) -> None:
        """Drop requests without a result; unknown indexes, and those whose KV is being gathered, are left alone."""
        wanted = set(indexes)
        if any(task.request.index in wanted for task in self._waiting):
            self._waiting = deque(task for task in self._waiting if task.request.index not in wanted)
        for index in wanted & self._running.keys():
            self._drop(self._running[index])

    def indexes(self) -> set[int]:
        """Return the indexes of all requests here."""
        return {task.request.index for task in self._waiting} | self._running.keys()

    def fail(self, index: int, kind: str, text: str) -> None:
        """End a started request with an error."""
        task = self._running.get(index)
        if task is not None and not task.dropped:
            self._failures.append(_failure(task.request, kind, text))
            task.is_exporting = False
            self._drop(task)

    def index_in(self, slot: int) -> int:
        """Return the index of the request that has `slot`."""
        return self._by_slot[slot].request.index

    def exported(self, index: int) -> None:
        """The KV of a finished request is in its buffer: free slot and blocks."""
        task = self._running.get(index)
        assert task is not None, f"request {index} has no slot"
        assert task.is_exporting, f"request {index} is not being exported"
        self._release(task)

    def has_work(self) -> bool:
        """True while anything waits, runs, is exported, or is to be reported."""
        return bool(self._waiting or self._running or self._failures)

    def load(self) -> SchedulerLoad:
        """Return the present counts."""
        return SchedulerLoad(len(self._waiting), len(self._running), self._cache.num_free_blocks())

    def plan(self, step_id: int) -> StepPlan:
        """Go on with the started prompts in order, then start waiting ones, until the budget is spent."""
        budget = self._max_tokens_per_step
        chunks: list[PrefillChunk] = []
        admissions: list[SlotAdmission] = []
        grants: list[BlockGrant] = []
        for task in self._running.values():
            if budget and task.num_remaining and not task.dropped:
                chunks.append(_next_chunk(task, budget))
                budget -= chunks[-1].num_tokens
        while budget and self._waiting and len(self._running) < self._max_running:
            task = self._waiting[0]
            reservation = self._cache.reserve(task.request.index, len(task.token_ids))
            if reservation is None:
                break
            self._waiting.popleft()
            task.slot = reservation.slot
            self._running[task.request.index] = self._by_slot[task.slot] = task
            admissions.append(_admission(task))
            grants.extend(BlockGrant(task.slot, run.group, run.first_index, run.block_ids) for run in reservation.runs)
            chunks.append(_next_chunk(task, budget))
            budget -= chunks[-1].num_tokens
        return StepPlan(step_id, admissions=tuple(admissions), grants=tuple(grants), chunks=tuple(chunks))

    def apply(self, plan: StepPlan, output: StepOutput) -> StepResults:
        """Take the results of the oldest step in flight."""
        prefilled = []
        sampled = iter(output.slots)
        for chunk in plan.chunks:
            task = self._by_slot[chunk.slot]
            task.num_in_flight -= 1
            if chunk.slot in output.prompt_logprobs:
                task.prompt_logprobs.append(output.prompt_logprobs[chunk.slot])
            result = next(sampled) if chunk.samples else None
            assert result is None or result.slot == chunk.slot, f"output of {result} stands at slot {chunk.slot}"
            if task.dropped:
                self._drop(task)
            elif result is not None and result.failure is not None:
                self.fail(task.request.index, "numerical_error", result.failure)
            elif result is not None:
                prefilled.append(self._finish(task, result))
        failures, self._failures = tuple(self._failures), []
        without_rules = tuple(item.request.request_id for item in prefilled if item.num_fell_back)
        return StepResults(plan.step_id, prefilled=tuple(prefilled), failures=failures, without_rules=without_rules)

    def _finish(self, task: PrefillTask, result: SlotOutput) -> Prefilled:
        request = task.request
        token_ids = tuple(int(token_id) for token_id in result.token_ids)
        assert len(token_ids) == request.num_samples, f"{len(token_ids)} tokens for {request.num_samples} samples"
        codes = tuple(self._make_stop_checker(request).check((token_id,)).code for token_id in token_ids)
        needs_export = FinishCode.NONE in codes
        num_tokens = len(task.token_ids)
        prefilled = Prefilled(
            request=request,
            first_token_ids=token_ids,
            finish_codes=codes,
            first_logprobs=result.logprobs,
            prompt_logprobs=_prompt_logprobs(task),
            slot=task.slot,
            block_ids=self._cache.block_table(request.index, num_tokens),
            num_tokens=num_tokens,
            needs_export=needs_export,
            num_fell_back=result.num_fell_back(len(token_ids)),
        )
        task.is_exporting = needs_export
        if not needs_export:
            self._release(task)
        return prefilled

    def _drop(self, task: PrefillTask) -> None:
        if not task.is_exporting:
            task.dropped = True
            if task.num_in_flight == 0:
                self._release(task)

    def _release(self, task: PrefillTask) -> None:
        assert task.num_in_flight == 0, f"request {task.request.index} is released with steps in flight"
        self._cache.release(task.request.index)
        del self._running[task.request.index], self._by_slot[task.slot]


def _next_chunk(task: PrefillTask, budget: int) -> PrefillChunk:
    num_tokens = min(budget, task.num_remaining)
    chunk = PrefillChunk(task.slot, task.num_scheduled, num_tokens, samples=num_tokens == task.num_remaining)
    task.num_scheduled += num_tokens
    task.num_in_flight += 1
    return chunk


def _admission(task: PrefillTask) -> SlotAdmission:
    request = task.request
    return SlotAdmission(
        slot=task.slot,
        token_ids=task.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        first_sample=request.first_sample,
        num_samples=request.num_samples,
        grammar=task.grammar,
    )


def _prompt_logprobs(task: PrefillTask) -> LogprobColumns | None:
    if task.request.sampling.prompt_logprobs is None:
        return None
    return prompt_columns(task.prompt_logprobs, task.request.num_prompt_tokens)


def _failure(request: Request, kind: str, text: str) -> RequestFailure:
    return RequestFailure(request_id=request.request_id, index=request.index, kind=kind, text=text)
