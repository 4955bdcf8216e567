"""The driver: one named actor that knows every unfinished request and calls every rank.

A single asyncio loop. It is never on the path of a token: batches go out and results come in at the pace of requests
and of `publish_seconds`, and the KV that a decode rank takes over passes by as references that are never opened here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deepinfer import __version__, codec
from deepinfer.actors.adoption import ROLES, FoundGroup, find_groups
from deepinfer.actors.batch_sender import BatchSender
from deepinfer.actors.driver_metrics import DriverMetrics
from deepinfer.actors.driver_status import LoadBook, describe_ranks
from deepinfer.actors.engine_facts import EngineFacts
from deepinfer.actors.group_keeper import GroupKeeper
from deepinfer.actors.group_start import start_together
from deepinfer.actors.job_desk import JobDesk
from deepinfer.actors.kv_channel import may_share_memory
from deepinfer.actors.names import driver_name
from deepinfer.actors.place_need import check_places
from deepinfer.actors.rank_life import RankFacts, RankProgram
from deepinfer.actors.supervisor import EnginePlan, check_equal
from deepinfer.config import ClusterConfig, decode_config
from deepinfer.errors import ClusterError, DeepInferError, RankError, RequestError, SupersededError
from deepinfer.log import get_logger, phase, set_up_logging
from deepinfer.protocol import DecodeResult, OutputBatch, PrefillResult, RequestBatch, Role
from deepinfer.scheduler.batch_scheduler import BatchScheduler, OutgoingBatch
from deepinfer.scheduler.load_balancer import DecodeCapacity

# Below this many running sequences every result is passed on at once; above it results are gathered.
_FEW_SEQUENCES = 8
# A request that loses its rank this often fails; that is sooner than the group gives up, so that one request which
# breaks every rank it meets does not end the engine.
_MAX_ATTEMPTS = 2
_COUNT_SECONDS = 0.05
_ADMIT_SECONDS = 0.01
_DELIVER_SECONDS = 0.02
_DRAIN_POLL_SECONDS = 0.2
# Clients fetch their outputs at least this often; so long they have time for the last ones.
_FETCH_SECONDS = 1.0


class Driver:
    """One engine's driver: `start` once, then jobs `submit`, fetch `next_outputs`, `close_job`; `stop` at the end."""

    def __init__(self, name: str, log_level: str, *, is_shared: bool = False) -> None:
        """Remember the engine's name; nothing is started.

        The engine of `is_shared` outlives its clients: one that is silent for `scheduler.job_timeout_seconds` is taken
        for dead, and what its job has here is given up. Its ranks outlive their driver in turn, for
        `scheduler.orphan_timeout_seconds`, and the next driver of that name takes them over.
        """
        set_up_logging(log_level, process="driver")
        self._name = name
        self._is_shared = is_shared
        self._logger = get_logger("driver")
        self._state = "created"
        self._fatal: str | None = None
        self._facts: EngineFacts | None = None
        self._keepers: dict[Role, GroupKeeper] = {}
        self._loads = LoadBook()
        self._desk = JobDesk()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_sequences = 0
        self._counted_at = 0.0

    def __repr__(self) -> str:
        """Name shown by Ray's dashboard and in its logs."""
        return f"Driver(engine={self._name})"

    async def start(self, config: bytes, model_directory: str, program: RankProgram) -> EngineFacts:
        """Bring both groups up and return what the engine is; raises what stopped the start, with everything gone.

        Ranks that an earlier driver of a shared engine has left are taken over where they are what is asked for. Where
        not, their group is started again.
        """
        self._config = decode_config(config)
        self._stirred = asyncio.Event()
        self._changed = asyncio.Event()
        self._metrics = DriverMetrics(self._config.observability.metrics_interval_seconds)
        self._state = "starting"
        found = await self._find_groups()
        self._plan = EnginePlan(
            name=self._name,
            config=self._config,
            directory=model_directory,
            program=program,
            epoch=1 + max((group.epoch for group in found.values()), default=0),
            is_shared=self._is_shared,
        )
        self._keepers = {role: GroupKeeper(role, self._plan, _RoleOwner(self, role)) for role in ROLES}
        try:
            with phase(self._logger, "start the engine"):
                await self._reserve(found)
                prefill, decode = await start_together([keeper.start() for keeper in self._keepers.values()])
                check_equal([*prefill, *decode])
        except BaseException as error:
            self._state = "failed"
            self._give_up(error)
            raise
        self._facts = EngineFacts(
            name=self._name,
            config=self._config,
            model_directory=model_directory,
            vocab_size=decode[0].vocab_size,
            max_model_len=decode[0].max_model_len,
            ranks=tuple(fact.ready for fact in (*prefill, *decode)),
            is_shared=self._is_shared,
        )
        self._scheduler = self._make_scheduler(prefill, decode)
        self._scheduler.allow_device_handover(may_share_memory(self._facts.ranks))
        self._sender = BatchSender(self._keepers, self._plan.epoch, self.take_result, self._end_batch)
        self._state = "ready"
        for keeper in self._keepers.values():
            self._spawn(keeper.keep())
        self._spawn(self._send_batches())
        self._spawn(self._export_metrics())
        if self._is_shared:
            self._spawn(self._drop_silent_jobs())
        return self._facts

    async def facts(self) -> EngineFacts:
        """Return what the engine is; it must have started."""
        assert self._facts is not None, "called before start"
        return self._facts

    # ---- jobs

    async def submit(self, data: bytes) -> None:
        """Take the new requests and the given-up ids in a `RequestBatch`; refusals come back as outputs."""
        batch = codec.decode(data)
        assert isinstance(batch, RequestBatch), type(batch)
        if not self._desk.hear(batch.job_id):
            return
        self._scheduler.abort(batch.job_id, batch.aborted_ids)
        for request in batch.requests:
            try:
                if self._scheduler.capacity(batch.job_id) <= 0:
                    raise RequestError(
                        f"the job has {self._config.scheduler.max_in_flight} open requests (scheduler.max_in_flight)",
                        code="too_many_requests",
                    )
                self._scheduler.submit(batch.job_id, request)
            except RequestError as error:
                self._desk.refuse(batch.job_id, request, error)
        self._stirred.set()

    async def next_outputs(self, job_id: str, wait_seconds: float) -> bytes:
        """Return an `OutputBatch` with the job's news; empty when there was none for `wait_seconds`.

        That the engine has failed, or has dropped the job, is said when all outputs have been fetched.
        """
        deadline = time.monotonic() + wait_seconds
        await self.keep_job(job_id)
        while True:
            outputs = (*self._desk.take_refusals(job_id), *self._scheduler.take_outputs(job_id))
            fatal = self._fatal or self._desk.why_closed(job_id)
            remaining = deadline - time.monotonic()
            if outputs or fatal or remaining <= 0:
                num_generated = self._scheduler.take_num_generated(job_id)
                fatal = None if outputs else fatal
                return codec.encode(OutputBatch(outputs=outputs, num_generated=num_generated, fatal=fatal))
            if await _is_set(self._changed, remaining) and self._is_busy():
                await asyncio.sleep(_DELIVER_SECONDS)

    async def keep_job(self, job_id: str) -> None:
        """Note that the job's client is alive."""
        self._desk.hear(job_id)

    async def close_job(self, job_id: str) -> None:
        """Give up what the job still has here, and forget it."""
        self._close(job_id, "the job is closed")

    def _close(self, job_id: str, reason: str) -> None:
        self._desk.close(job_id, reason)
        self._scheduler.drop_job(job_id)
        self._stirred.set()

    async def status(self) -> dict[str, Any]:
        """Return the state, the phase of every rank while starting, and the ranks, counts and loads afterwards."""
        status: dict[str, Any] = {
            "engine": self._name,
            "state": self._state,
            "fatal": self._fatal,
            "version": __version__,
            "pid": os.getpid(),
        }
        if self._state == "starting":
            phases = await asyncio.gather(*(keeper.phases() for keeper in self._keepers.values()))
            status["ranks"] = {name: text for part in phases for name, text in part.items()}
        elif self._facts is not None:
            num_loads = {role: keeper.num_loads for role, keeper in self._keepers.items()}
            status["ranks"] = describe_ranks(self._facts.ranks, num_loads)
            status["jobs"] = self._scheduler.jobs()
            status["requests"] = msgspec.to_builtins(self._scheduler.counts())
            status["loads"] = self._loads.describe()
            status["epoch"] = self._plan.epoch
            status["restarts"] = {role: keeper.num_restarts for role, keeper in self._keepers.items()}
            status["answers"] = self._metrics.num_answers
            status["driver_cpu_seconds"] = time.process_time()
        return status

    async def drain(self, seconds: float) -> int:
        """Start no more requests, and let those at the ranks end for up to `seconds`; return how many are left."""
        if self._facts is None or self._fatal is not None:
            return 0
        self._state = "draining"
        self._scheduler.drain()
        deadline = time.monotonic() + seconds
        while (num_left := self._num_started()) and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if self._desk.has_jobs:
            await asyncio.sleep(_FETCH_SECONDS)
        return num_left

    async def stop(self) -> None:
        """End all ranks in order. Jobs that are still open get a fatal output."""
        self._state = "stopped"
        self._fatal = self._fatal or "the engine was stopped"
        self._tell()
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))
        for task in list(self._tasks):
            task.cancel()

    # ---- the groups' news

    def take_result(self, role: Role, result: PrefillResult | DecodeResult, references: Sequence[ObjectRef]) -> None:
        """Pass a rank's result to the scheduler."""
        self._metrics.num_answers += 1
        self._loads.take(role, result.load)
        if isinstance(result, PrefillResult):
            self._scheduler.on_prefill_result(result.rank, result, references)
        else:
            self._scheduler.on_decode_result(result.rank, result)
        self._stirred.set()

    def lose_group(self, role: Role, error: RankError) -> None:
        """Have the scheduler replay what was on the group."""
        self._loads.drop(role)
        num_lost = self._scheduler.on_group_lost(role, str(error))
        self._logger.warning("%d requests lost their %s rank and will be replayed", num_lost, role)
        self._stirred.set()

    def regain_group(self, role: Role, facts: Sequence[RankFacts]) -> None:
        """Let the scheduler use the group again."""
        assert self._facts is not None
        check_equal(facts)
        others = [ready for ready in self._facts.ranks if ready.role != role]
        ranks = [*others, *(fact.ready for fact in facts)]
        in_order = sorted(ranks, key=lambda ready: (ready.role == "decode", ready.rank))
        self._facts = msgspec.structs.replace(self._facts, ranks=tuple(in_order))
        self._metrics.count_restart()
        self._scheduler.on_group_ready(role)
        self._scheduler.allow_device_handover(may_share_memory(self._facts.ranks))
        self._stirred.set()

    def gather_seconds(self) -> float:
        """Return how long ranks shall gather results: not at all while few sequences run."""
        return self._config.scheduler.publish_seconds if self._is_busy() else 0.0

    # ---- inside

    async def _find_groups(self) -> dict[Role, FoundGroup]:
        """Return what earlier drivers of this name have left; a private engine's name is used once."""
        if not self._is_shared:
            return {}
        return await asyncio.to_thread(find_groups, self._name, namespace=self._config.ray.namespace)

    async def _reserve(self, found: dict[Role, FoundGroup]) -> None:
        """Take the places of all ranks before the first one loads; nodes may still be joining meanwhile."""
        try:
            await start_together([keeper.reserve(found.get(role)) for role, keeper in self._keepers.items()])
        except SupersededError:
            raise
        except ClusterError:  # says what is free now; that it can never be enough comes first
            await asyncio.to_thread(check_places, self._config)
            raise

    def _make_scheduler(self, prefill: Sequence[RankFacts], decode: Sequence[RankFacts]) -> BatchScheduler:
        return BatchScheduler(
            config=self._config.scheduler,
            prefill_ranks=[fact.ready.rank for fact in prefill],
            decode_ranks=[
                DecodeCapacity(fact.ready.rank, fact.ready.num_blocks, fact.ready.num_slots) for fact in decode
            ],
            groups=decode[0].groups,
            draw_seed=lambda: secrets.randbits(63),
            max_attempts=_MAX_ATTEMPTS,
            first_index=max(keeper.first_index for keeper in self._keepers.values()),
            first_wake_id=self._plan.first_wake_id,
        )

    async def _send_batches(self) -> None:
        """Send what the scheduler has for the ranks; admissions that come together travel together."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            for outgoing in self._scheduler.next_batches():
                self._spawn(self._sender.send(outgoing))
            self._tell()
            if self._is_busy():
                await asyncio.sleep(_ADMIT_SECONDS)

    def _end_batch(self, outgoing: OutgoingBatch) -> None:
        """Let prefill ranks have back what was fetched for a batch; it is sent with whatever else there is to send."""
        self._scheduler.on_batch_over(outgoing)
        if outgoing.pieces:
            self._stirred.set()

    async def _drop_silent_jobs(self) -> None:
        """Give up the jobs of clients that were killed: they neither fetch nor say that they are alive."""
        limit = self._config.scheduler.job_timeout_seconds
        while True:
            await asyncio.sleep(limit / 4)
            for job_id in self._desk.silent_jobs(limit):
                self._logger.warning("job %s: nothing heard of its client for %g s, dropped", job_id, limit)
                self._close(
                    job_id,
                    f"the engine heard nothing of this job for {limit:g} s (scheduler.job_timeout_seconds) "
                    "and dropped it",
                )

    async def _export_metrics(self) -> None:
        while True:
            await asyncio.sleep(self._config.observability.metrics_interval_seconds)
            self._metrics.export(self._scheduler.counts())

    def _is_busy(self) -> bool:
        """True when so many sequences are open that gathering costs nobody time. Counted at most 20 times a second."""
        now = time.monotonic()
        if now - self._counted_at > _COUNT_SECONDS:
            self._num_sequences = self._num_started()
            self._counted_at = now
        return self._num_sequences >= _FEW_SEQUENCES

    def _num_started(self) -> int:
        counts = self._scheduler.counts()
        return counts.num_prefilling + counts.num_prefilled + counts.num_decoding

    def _tell(self) -> None:
        """Wake everyone who waits for outputs."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task of the driver; what breaks it ends the engine, and every job hears why."""
        try:
            await work
        except Exception as error:
            self._logger.exception("the engine has failed")
            known = isinstance(error, DeepInferError)
            self._fatal = self._fatal or (str(error) if known else f"the driver broke: {type(error).__name__}: {error}")
            self._state = "failed"
            self._give_up(error)
            self._tell()

    def _give_up(self, error: BaseException) -> None:
        """End all ranks, unless they obey another driver."""
        for keeper in self._keepers.values():
            if isinstance(error, SupersededError):
                keeper.release()
            else:
                keeper.kill()


class _RoleOwner:
    """Tells the driver which role the news are about."""

    def __init__(self, driver: Driver, role: Role) -> None:
        self._driver = driver
        self._role: Role = role

    def on_result(self, result: PrefillResult | DecodeResult, references: Sequence[ObjectRef]) -> None:
        self._driver.take_result(self._role, result, references)

    def on_lost(self, error: RankError) -> None:
        self._driver.lose_group(self._role, error)

    def on_restarted(self, facts: Sequence[RankFacts]) -> None:
        self._driver.regain_group(self._role, facts)

    def gather_seconds(self) -> float:
        return self._driver.gather_seconds()


def create_driver(config: ClusterConfig, *, name: str, detached: bool = False) -> ActorHandle[Any]:
    """Create the driver actor of the engine `name`; a detached one outlives the process that made it.

    It runs on this process's node, which with `up` is the head, so that no other node can take it along.
    """
    # Where it is only wished for, Ray 2.60 puts an actor without CPUs on any node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote: Any = ray.remote(Driver)
    handle: ActorHandle[Any] = remote.options(
        name=driver_name(name),
        namespace=config.ray.namespace,
        lifetime="detached" if detached else None,
        scheduling_strategy=here,
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
        runtime_env=config.ray.runtime_env or None,
    ).remote(name, config.observability.log_level, is_shared=detached)
    return handle


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
