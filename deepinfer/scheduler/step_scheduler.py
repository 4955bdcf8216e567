"""One rank's scheduler: decides which rows run in the next step and takes in what came back.

Pure Python; called by the step thread only. The loop around it, with at most two steps in flight:

    add / admit / abort;  imports = next_imports();  run the imports;  plan = plan(step_id);  launch plan;
    while it runs: results = apply(the plan before it, its output);  publish results

Every plan is applied exactly once and in order, an idle one with an empty `StepOutput`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepinfer.kv_cache.cache_manager import CacheManager
from deepinfer.protocol import AdmittedRequest, Request, Role
from deepinfer.scheduler.decode_lane import DecodeLane
from deepinfer.scheduler.prefill_lane import PrefillLane
from deepinfer.scheduler.sequence import MakeStopChecker
from deepinfer.scheduler.step_plan import StepOutput, StepPlan
from deepinfer.scheduler.step_results import KVImport, SchedulerLoad, StepResults


class StepScheduler:
    """What one rank runs, step by step.

    `max_running`: prompts (prefill) or sequences (decode) in work at once. `max_tokens_per_step` bounds the rows of a
    prefill step. `max_model_len` bounds prompt and output of a sequence. `max_rows_per_slot`: most tokens that a
    decode step commits per sequence (1 + drafts). `make_stop_checker(request)` builds what ends a sequence;
    it has to stop at `max_tokens` and at `max_model_len`, the earlier output of a replay counted.
    """

    def __init__(
        self,
        *,
        role: Role,
        cache: CacheManager,
        max_running: int,
        max_tokens_per_step: int,
        max_model_len: int,
        make_stop_checker: MakeStopChecker,
        max_rows_per_slot: int = 1,
    ) -> None:
        """Start with nothing to do. `cache` belongs to this scheduler from now on."""
        self._cache = cache
        self._lane: PrefillLane | DecodeLane
        if role == "prefill":
            self._lane = PrefillLane(
                cache=cache,
                max_running=max_running,
                max_tokens_per_step=max_tokens_per_step,
                max_model_len=max_model_len,
                make_stop_checker=make_stop_checker,
            )
        else:
            self._lane = DecodeLane(
                cache=cache,
                max_running=max_running,
                max_model_len=max_model_len,
                max_rows_per_slot=max_rows_per_slot,
                make_stop_checker=make_stop_checker,
            )
        self._steps_in_flight: deque[int] = deque()

    def add(self, request: Request, grammar: object | None = None) -> None:
        """Prefill: queue a request. One that can never run fails with the next results.

        `grammar` comes back in the `SlotAdmission`s of the request.
        """
        assert isinstance(self._lane, PrefillLane), "a decode rank runs no prompts"
        self._lane.add(request, grammar)

    def admit(self, admitted: AdmittedRequest, buffer: object, grammar: object | None = None) -> None:
        """Decode: queue the sequences of a prefilled request; `buffer` comes back in their `KVImport`s."""
        assert isinstance(self._lane, DecodeLane), "a prefill rank decodes nothing"
        self._lane.admit(admitted, buffer, grammar)

    def abort(self, sequence_indexes: Iterable[int]) -> None:
        """Drop work without a result: by request index on a prefill rank, by sequence index on a decode rank."""
        self._lane.abort(sequence_indexes)

    def abort_all(self) -> None:
        """Drop all work without a result. What is being exported still comes, as after `abort`."""
        self._lane.abort(self._lane.indexes())

    def fail_slot(self, slot: int, kind: str, text: str) -> None:
        """End the started request (prefill) or placed sequence (decode) in `slot`; the next results have the error."""
        self._lane.fail(self._lane.index_in(slot), kind, text)

    def has_work(self) -> bool:
        """True while anything waits, runs, is being exported, or is to be reported; an idle step in flight is no work.

        A sequence with a step in flight counts as running, so nothing is lost by parking when this is False.
        """
        return self._lane.has_work()

    def next_imports(self) -> list[KVImport]:
        """Decode: place sequences; their KV has to be scattered before the plan that follows runs. Prefill: none."""
        return self._lane.next_imports() if isinstance(self._lane, DecodeLane) else []

    def plan(self, step_id: int) -> StepPlan:
        """Return the next step, which may be idle; earlier steps may still be in flight."""
        plan = self._lane.plan(step_id)
        self._steps_in_flight.append(step_id)
        return plan

    def apply(self, plan: StepPlan, output: StepOutput) -> StepResults:
        """Take in the output of the oldest step in flight and return what is to be published."""
        oldest = self._steps_in_flight.popleft()
        assert plan.step_id == output.step_id == oldest, f"step {output.step_id} applied, {oldest} is the oldest"
        return self._lane.apply(plan, output)

    def exported(self, index: int) -> None:
        """Prefill: the KV of request `index` has been gathered; its slot and blocks are free again."""
        assert isinstance(self._lane, PrefillLane), "a decode rank exports nothing"
        self._lane.exported(index)

    def load(self) -> SchedulerLoad:
        """Return the present counts, for a `RankLoad`."""
        return self._lane.load()

    def check_integrity(self) -> None:
        """Assert that no block or slot is lost or held twice, and that an idle rank holds none."""
        self._cache.check_integrity()
        if not self.has_work():
            assert self._cache.num_sequences == 0, f"an idle rank holds {self._cache.num_sequences} sequences"
