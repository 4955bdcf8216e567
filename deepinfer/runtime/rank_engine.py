"""The loop of one rank: take messages in, plan, agree, launch, and handle results one step late.

A step is launched before the results of the one before it have been read: the tokens it needs are in the slot table on
the device, and the host follows. So while the device runs a step, the host reads the last results, finds the ends of
sequences, publishes and plans. A sequence that turns out to have ended costs at most one wasted row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer.codec import unpack
from deepinfer.distributed.step_sync import StepProposal, StepSync
from deepinfer.errors import RankError, RequestError
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.log import about, get_logger
from deepinfer.platforms.platform import Piece, Stream
from deepinfer.protocol import (
    DecodeBatch,
    DecodeResult,
    KVHandle,
    PrefillBatch,
    PrefillResult,
    RankLoad,
    RankReady,
    RequestFailure,
    Role,
    StepProfile,
)
from deepinfer.runtime.grammar_gate import GrammarGate
from deepinfer.runtime.idle_meter import IdleMeter
from deepinfer.runtime.in_flight import ExportInFlight, ImportInFlight, InFlight, StepInFlight
from deepinfer.runtime.inbox import Inbox, Posted
from deepinfer.runtime.kv_export import KVExport
from deepinfer.runtime.kv_intake import KVIntake
from deepinfer.runtime.kv_transfer import Buffer, HeldKV, check_handover, split_parts
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.outbox import DecodeOutbox, PrefillOutbox
from deepinfer.runtime.piece_arena import PieceArena
from deepinfer.runtime.rank_metrics import RankMetrics
from deepinfer.runtime.slot_masks import SlotMasks
from deepinfer.runtime.step_profiler import StepProfiler
from deepinfer.scheduler.request_state import failed_handover
from deepinfer.scheduler.step_plan import StepOutput, StepPlan
from deepinfer.scheduler.step_results import KVImport, StepResults
from deepinfer.scheduler.step_scheduler import StepScheduler
from deepinfer.speculative.verify_planner import VerifyPlanner
from deepinfer.structured_outputs.compiler import GrammarCompiler

StepObserver = Callable[[Literal["launched", "read"], int], None]
_MAX_STUCK_TURNS = 3
_WITHOUT_RULES = "min_tokens or bad words leave none of the allowed tokens; tokens are drawn without these rules"
_GRAMMAR_SECONDS = 0.005  # between two looks at a grammar that is being compiled, when there is nothing else to do


@dataclass(slots=True, frozen=True)
class EngineParts:
    """What a rank engine is put together from; see `build.py`."""

    role: Role
    rank: int
    scheduler: StepScheduler
    runner: ModelRunner
    stream: Stream
    sync: StepSync
    metrics: RankMetrics
    compiler: GrammarCompiler
    groups: tuple[KVGroup, ...]
    ready: RankReady
    vocab_size: int
    max_model_len: int
    asynchronous: bool = True
    observe_step: StepObserver | None = None
    planner: VerifyPlanner | None = None
    check_exchange: Callable[[], None] | None = None  # raises what went wrong between ranks on the device
    arena: PieceArena | None = None  # prefill: memory from which decode ranks of this host may fetch hand-overs
    intake: KVIntake | None = None  # decode: what fetches them


class RankEngine:
    """One rank without Ray. `run` is the step thread; `post`, `take_results`, `stop` and `status` are for any other.

    `results_ready` is called from the step thread when there is something to take.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Take over `parts`; nothing runs yet."""
        self.ready = parts.ready
        self.groups = parts.groups
        self.vocab_size = parts.vocab_size
        self.max_model_len = parts.max_model_len
        self.results_ready: Callable[[], None] = _nobody_waits
        self._parts = parts
        self._scheduler = parts.scheduler
        self._stream = parts.stream
        self._logger = get_logger(f"{parts.role}-{parts.rank}")
        self._inbox = Inbox()
        self._prefill_outbox = PrefillOutbox(parts.rank)
        self._decode_outbox = DecodeOutbox(parts.rank)
        self._outbox = self._prefill_outbox if parts.role == "prefill" else self._decode_outbox
        self._export = KVExport(
            parts.runner, parts.stream, parts.arena, rank=parts.rank, layout_digest=parts.ready.layout_digest
        )
        self._gate = GrammarGate(parts.compiler, parts.scheduler)
        self._masks = SlotMasks(parts.runner.max_drafts)
        self._profiler = StepProfiler(parts.stream)
        self._in_flight: deque[InFlight] = deque()
        self._idle = IdleMeter()
        self._step_id = 0
        self._wake_id = 0
        self._parked = False
        self._num_stuck_turns = 0
        self._step_seconds = 0.0
        self._load = self._read_load()

    # ---- any thread

    def post(self, message: PrefillBatch | DecodeBatch, buffers: Sequence[Buffer] = ()) -> None:
        """Put a message into the inbox; `buffers` as for a decode batch. One thread at a time.

        Hand-overs are checked, and fetched if they lie in a prefill rank's memory, here, on the caller's thread; one
        that is wrong fails its request and nothing else. Nothing reads that memory any more when this has returned.
        """
        if isinstance(message, PrefillBatch):
            self._inbox.put(Posted(message))
            return
        if self._parts.intake is not None and (message.closes_memory or message.drops_all):
            self._parts.intake.forget()
        in_order = iter(buffers)
        kept: list[HeldKV | None] = []
        failures: list[RequestFailure] = []
        for admitted in message.admitted:
            buffer = next(in_order) if admitted.kv.place is None else None
            try:
                kept.append(self._take_handover(admitted.kv, buffer))
            except RequestError as error:
                kept.append(None)
                failures.extend(failed_handover(admitted, kind=error.code, text=str(error)))
        self._inbox.put(Posted(message, tuple(kept), tuple(failures)))

    def _take_handover(self, handle: KVHandle, buffer: Buffer | None) -> HeldKV:
        """Return the checked hand-over; raises RequestError."""
        if buffer is not None:
            check_handover(handle, buffer, layout_digest=self.ready.layout_digest)
            return buffer
        assert self._parts.intake is not None, "a rank without an intake was sent a place"
        return self._parts.intake.fetch(handle, layout_digest=self.ready.layout_digest)

    def take_results(self) -> tuple[PrefillResult | DecodeResult | None, list[Buffer]]:
        """Return what is new since the last call (None if nothing), and KV buffers in the order of their items."""
        return self._outbox.take(self._load)

    def stop(self) -> None:
        """End `run` once the group has agreed; work that is not finished is dropped."""
        self._inbox.stop()

    def status(self) -> dict[str, Any]:
        """Return plain numbers of this moment."""
        load = self._load
        return {
            "step": self._step_id,
            "waiting": load.num_waiting,
            "running": load.num_running,
            "free_blocks": dict(load.num_free_blocks),
            "device_idle_share": load.device_idle_share,
            "step_seconds": load.step_seconds,
            "parked": self._parked,
            "wake_id": self._wake_id,
            "handovers": self._export.counts(),
        }

    def profile(self, num_steps: int, wait_seconds: float, *, with_host: bool = True) -> StepProfile | None:
        """Profile the next steps; see `StepProfiler.take`."""
        return self._profiler.take(num_steps, wait_seconds=wait_seconds, with_host=with_host)

    # ---- the step thread

    def run(self) -> None:
        """Run steps until `stop`. Raises RankError that names the rank, the step and what broke it."""
        try:
            while self._turn():
                pass
        except Exception as error:
            role, rank = self._parts.role, self._parts.rank
            inner = str(error).removeprefix(f"{role} rank {rank}: ")  # of a collective's RankError
            cause = inner if isinstance(error, RankError) else f"{type(error).__name__}: {inner}"
            raise RankError(f"step {self._step_id} broke: {cause}", role=role, rank=rank) from error
        finally:
            self._stream.close()
            if self._parts.intake is not None:
                self._parts.intake.close()

    def _turn(self) -> bool:
        """Go once around the loop; False when the group has agreed to stop."""
        self._take_messages()
        stopping = self._inbox.stopping  # read after the messages: what was posted before `stop` is seen
        for entry in self._scheduler.next_imports():
            self._submit_import(entry)
        has_work = self._has_work() or bool(self._in_flight)
        plan = self._scheduler.plan(self._step_id)
        planner = self._parts.planner
        agreement = self._parts.sync.agree(
            StepProposal(
                has_work=has_work,
                num_rows=plan.num_rows,
                wake_id=self._wake_id,
                stopping=stopping,
                wants_drafts=planner is None or planner.wants_drafts(plan),
            )
        )
        plan.is_drafting = agreement.is_drafting
        if agreement.stop:
            return False
        self._step_id += 1
        launched = agreement.max_rows > 0
        if launched:
            self._launch(plan)
        else:
            self._in_flight.append(StepInFlight(plan))
        self._settle(launched=launched)
        if not launched and self._gate.num_held:
            self._inbox.wait(_GRAMMAR_SECONDS)
        self._check_progress(stuck=has_work and not launched and not self._in_flight and self._scheduler.has_work())
        self._load = self._read_load()
        if agreement.park:
            self._park()
        return True

    def _take_messages(self) -> None:
        failures: list[RequestFailure] = []
        for posted in self._inbox.take():
            message = posted.message
            self._wake_id = max(self._wake_id, message.wake_id)
            if message.drops_all:
                self._gate.abort_all()
            if isinstance(message, PrefillBatch):
                self._export.follow(message)
                for request in message.requests:
                    self._gate.add(request)
            else:
                for admitted, buffer in zip(message.admitted, posted.buffers, strict=True):
                    if buffer is not None:
                        self._gate.admit(admitted, buffer)
            if message.aborted_indexes:
                self._gate.abort(set(unpack(message.aborted_indexes).tolist()))
            failures.extend(posted.failures)
        failures.extend(self._gate.release())
        if failures:
            self._add_failures(failures)
            self._announce()

    def _has_work(self) -> bool:
        return self._scheduler.has_work() or self._gate.num_held > 0

    def _submit_import(self, entry: KVImport) -> None:
        def scatter() -> None:
            parts = split_parts(entry.handle, buffer)
            self._parts.runner.import_kv(
                slot=entry.slot, block_ids=entry.block_ids, num_tokens=entry.num_tokens, parts=parts
            )

        buffer: HeldKV = entry.buffer  # type: ignore[assignment]
        self._in_flight.append(ImportInFlight(self._stream.submit(scatter), entry.handle.nbytes, buffer))

    def _launch(self, plan: StepPlan) -> None:
        self._masks.admit(plan)
        if self._parts.planner is not None:
            plan.draft_budget = self._parts.planner.budget(plan)
        self._profiler.begin_step(plan.step_id)
        start = self._stream.submit(lambda: self._parts.runner.start_step(plan))
        self._in_flight.append(StepInFlight(plan, start))
        self._observe("launched", plan.step_id)
        self._finish_launched()

    def _finish_launched(self) -> None:
        """Have the newest step draw its tokens as soon as its masks can be built; they are, while its rows run."""
        steps = [entry for entry in self._in_flight if isinstance(entry, StepInFlight) and entry.start is not None]
        if not steps or steps[-1].finish is not None:
            return
        entry = steps[-1]
        if len(steps) > 1 and self._masks.needs_results(entry.plan):
            return
        masks = self._masks.build(entry.plan)
        entry.finish = self._stream.submit(lambda: self._parts.runner.finish_step(entry.plan, masks))
        self._profiler.end_step()
        for slot, text in self._masks.take_failures():
            self._scheduler.fail_slot(slot, "grammar_error", text)

    def _settle(self, *, launched: bool) -> None:
        """Handle the oldest things in flight: until one step is left, or none when this loop is synchronous.

        Without a new step there is nothing to hide behind: wait for at least one result.
        """
        limit = 1 if self._parts.asynchronous else 0
        if not launched:
            self._finish_oldest()
        while self._in_flight and (self._num_steps_running() > limit or self._in_flight[0].is_ready()):
            self._finish_oldest()
        if not self._has_work():
            self._idle.pause()

    def _num_steps_running(self) -> int:
        return sum(isinstance(entry, StepInFlight) and entry.start is not None for entry in self._in_flight)

    def _finish_oldest(self) -> None:
        entry = self._in_flight.popleft()
        if isinstance(entry, StepInFlight):
            self._finish_step(entry)
        elif isinstance(entry, ImportInFlight):
            entry.piece.result()
            self._count_transfer(entry.piece, entry.num_bytes)
        else:
            self._finish_export(entry)

    def _finish_step(self, entry: StepInFlight) -> None:
        output = StepOutput(entry.plan.step_id)
        if entry.start is not None:
            assert entry.finish is not None, "the oldest step waits for no results"
            output = entry.finish.result().resolve()
            if self._parts.check_exchange is not None:
                self._parts.check_exchange()
            for piece in (entry.start, entry.finish):
                self._record_work(piece, padding=entry.plan.is_idle)
                output.device_seconds += piece.end_seconds - piece.begin_seconds
            self._observe("read", output.step_id)
            self._masks.take(entry.plan, output)
            if self._parts.planner is not None:
                self._parts.planner.observe(entry.plan, output)
            self._finish_launched()
        results = self._scheduler.apply(entry.plan, output)
        self._publish(results)
        if not entry.plan.is_idle:
            self._step_seconds = output.device_seconds
            self._parts.metrics.count_step(
                entry.plan,
                results,
                load=self._scheduler.load(),
                seconds=output.device_seconds,
                idle_share=self._idle.share,
            )

    def _publish(self, results: StepResults) -> None:
        for prefilled in results.prefilled:
            if prefilled.needs_export:
                self._in_flight.append(self._export.submit(prefilled))
            else:
                self._prefill_outbox.add(prefilled)
        self._decode_outbox.add(results.decoded)
        self._add_failures(results.failures)
        for request_id in results.without_rules:
            fields = about(step=results.step_id, request=request_id)
            self._logger.warning(_WITHOUT_RULES, extra=fields)
        if results.decoded or results.failures or any(not item.needs_export for item in results.prefilled):
            self._announce()

    def _add_failures(self, failures: Sequence[RequestFailure]) -> None:
        for failure in failures:
            fields = about(step=self._step_id, request=failure.request_id)
            self._logger.warning("%s: %s", failure.kind, failure.text, extra=fields)
        self._outbox.add_failures(failures)

    def _finish_export(self, entry: ExportInFlight) -> None:
        handle, buffer = self._export.finish(entry)
        self._scheduler.exported(entry.prefilled.request.index)
        self._prefill_outbox.add(entry.prefilled, handle, buffer)
        self._count_transfer(entry.piece, handle.nbytes)
        self._parts.metrics.count_handover(on_device=buffer is None)
        self._announce()

    def _announce(self) -> None:
        self._load = self._read_load()
        self.results_ready()

    def _count_transfer(self, piece: Piece[Any], num_bytes: int) -> None:
        self._record_work(piece)
        self._parts.metrics.count_transfer(num_bytes=num_bytes, seconds=piece.end_seconds - piece.begin_seconds)

    def _record_work(self, piece: Piece[Any], *, padding: bool = False) -> None:
        """Time between steps with work counts; a padding step is no work of this rank."""
        if padding:
            self._idle.pause()
        else:
            self._idle.record(piece.begin_seconds, piece.end_seconds)

    def _check_progress(self, *, stuck: bool) -> None:
        self._num_stuck_turns = self._num_stuck_turns + 1 if stuck else 0
        assert self._num_stuck_turns <= _MAX_STUCK_TURNS, "the scheduler has work, plans no rows and waits for nothing"

    def _park(self) -> None:
        """Wait, with no collective open, for a newer wake, for work, or for the order to stop."""
        self._scheduler.check_integrity()
        self._profiler.pause()
        seen = self._wake_id
        self._parked = True
        while self._wake_id == seen and not self._has_work() and not self._inbox.stopping:
            self._inbox.wait()
            self._take_messages()
        self._parked = False

    def _read_load(self) -> RankLoad:
        load = self._scheduler.load()
        return RankLoad(
            rank=self._parts.rank,
            step_id=self._step_id,
            num_waiting=load.num_waiting + self._gate.num_held,
            num_running=load.num_running,
            num_free_blocks=load.num_free_blocks,
            step_seconds=self._step_seconds,
            device_idle_share=self._idle.share,
        )

    def _observe(self, event: Literal["launched", "read"], step_id: int) -> None:
        if self._parts.observe_step is not None:
            self._parts.observe_step(event, step_id)


def _nobody_waits() -> None:
    """Stand in for `results_ready` until the owner sets it."""
