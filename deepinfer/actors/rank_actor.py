"""The thin shell around a rank that both roles share: start in phases, one step thread, an inbox and an outbox.

Ray's methods only put into the engine's inbox or read from its outbox. They run in groups of threads of their own, so
that each kind of call always gets an answer: `loop` (the step thread), `inbox`, `results`, `watch` and `control`. Calls
of one caller are started in the order in which they were made.

A rank of a shared engine outlives its driver: it waits for a new one, which takes it over with `adopt`. Calls of a
driver that is not, or no more, the one in force raise SupersededError.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import ray
from ray import ObjectRef
from ray.util.placement_group import get_current_placement_group, remove_placement_group

from deepinfer import __version__, codec
from deepinfer.actors.epoch_gate import EpochGate
from deepinfer.actors.kv_channel import Buffer, KVChannel
from deepinfer.actors.orphan_watch import OrphanWatch
from deepinfer.actors.rank_life import (
    RankExit,
    RankFacts,
    RankOrigin,
    RankPlace,
    RankProgram,
    RankProgress,
    RankSource,
    RankState,
)
from deepinfer.actors.ray_metrics import RayRecorder
from deepinfer.config import decode_config
from deepinfer.errors import RankError
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.log import get_logger, phase, set_up_logging
from deepinfer.protocol import DecodeBatch, DecodeResult, PrefillBatch, PrefillResult, RankReady, Role, StepProfile

CONCURRENCY_GROUPS = {"loop": 1, "inbox": 1, "results": 1, "watch": 1, "control": 1, "profile": 1}
# An idle rank answers this often: it is the heartbeat.
HEARTBEAT_SECONDS = 2.0


class RankEngine(Protocol):
    """What a rank's engine offers to the actor; `runtime.rank_engine` is the real one."""

    ready: RankReady
    groups: tuple[KVGroup, ...]
    vocab_size: int
    max_model_len: int
    results_ready: Callable[[], None]

    def post(self, message: PrefillBatch | DecodeBatch, buffers: Sequence[Buffer] = ()) -> None:
        """Put a message into the inbox; any thread."""
        ...

    def take_results(self) -> tuple[PrefillResult | DecodeResult | None, list[Buffer]]:
        """Return what is new since the last call; any thread."""
        ...

    def run(self) -> None:
        """Run steps until `stop`; raises what broke the rank."""
        ...

    def stop(self) -> None:
        """End `run`; any thread."""
        ...

    def status(self) -> dict[str, Any]:
        """Return plain numbers, among them `step` and `parked`; any thread."""
        ...

    def profile(self, num_steps: int, wait_seconds: float) -> StepProfile | None:
        """Profile the next steps; None when none ran within `wait_seconds`; any thread."""
        ...


class RankActor:
    """One rank. Life: `__init__` (cheap), `probe`, `load_code`, `open_store` on rank 0, `setup`, then `run`.

    A new driver begins with `introduce` and `adopt`; every driver holds `watch` open, the rank's sign of life.
    """

    role: ClassVar[Role]

    def __init__(self, origin: RankOrigin, rank: int, num_ranks: int, log_level: str) -> None:
        """Remember who this is; nothing is loaded."""
        set_up_logging(log_level, process=f"{self.role}-{rank}")
        self._origin = origin
        self._gate = EpochGate(origin.epoch)
        self._rank = rank
        self._num_ranks = num_ranks
        self._logger = get_logger(f"{self.role}-{rank}")
        self._phase = "placed"
        self._channel = KVChannel()
        self._news = threading.Event()
        self._engine: RankEngine | None = None
        self._recorder: RayRecorder | None = None
        self._store: Any = None
        self._source: RankSource | None = None
        self._is_running = False
        self._has_ended = False
        self._exit: RankExit | None = None
        self._next_index = 0
        seconds = origin.orphan_timeout_seconds
        self._orphan_watch = OrphanWatch(math.inf if seconds is None else seconds)
        if seconds is not None:
            self._orphan_watch.start(self._end_orphan)

    def __repr__(self) -> str:
        """Name shown by Ray's dashboard and in its logs."""
        return f"{type(self).__name__}(rank={self._rank}, of={self._num_ranks}, engine={self._origin.engine})"

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def probe(self) -> RankPlace:
        """Return where this rank runs."""
        context = ray.get_runtime_context()
        return RankPlace(
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            device_ids=tuple(context.get_accelerator_ids().get("GPU", ())),
        )

    @ray.method(concurrency_group="loop")  # type: ignore[untyped-decorator]
    def load_code(self, program: RankProgram) -> None:
        """Import what the rank will run."""
        self._enter("loading code")
        with phase(self._logger, "load code"):
            for path in (program.build, program.open_store):
                _load(path)

    @ray.method(concurrency_group="loop")  # type: ignore[untyped-decorator]
    def open_store(self, program: RankProgram) -> tuple[str, int]:
        """Open the group's rendezvous on this rank, keep it open, and return its address."""
        host = ray.util.get_node_ip_address()
        self._store, port = _load(program.open_store)(host)
        return host, port

    @ray.method(concurrency_group="loop")  # type: ignore[untyped-decorator]
    def setup(self, source: RankSource, store_address: tuple[str, int] | None) -> RankFacts:
        """Meet the other ranks at `store_address` and load the weights."""
        self._engine = self._load_engine(source, store_address)
        self._source = source
        self._enter("ready")
        return self._facts(self._engine)

    def _load_engine(self, source: RankSource, store_address: tuple[str, int] | None) -> RankEngine:
        settings = decode_config(source.config)
        interval = settings.observability.metrics_interval_seconds
        self._recorder = RayRecorder(role=self.role, rank=self._rank, interval_seconds=interval)
        self._enter("setting up")
        engine: RankEngine = _load(source.program.build)(
            settings,
            role=self.role,
            rank=self._rank,
            num_ranks=self._num_ranks,
            model_directory=source.model_directory,
            store_address=store_address,
            recorder=self._recorder,
            on_phase=self._enter,
        )
        engine.results_ready = self._news.set
        return engine

    @ray.method(concurrency_group="loop")  # type: ignore[untyped-decorator]
    def run(self) -> None:
        """Run steps until `stop`; how they ended is the answer of `watch`."""
        self._is_running = True
        try:
            self._loaded.run()
        except Exception as error:
            self._logger.exception("broken")
            self._exit = RankExit(
                cause=error.message if isinstance(error, RankError) else f"{type(error).__name__}: {error}",
                trace=traceback.format_exc(),
                blames_peer=isinstance(error.__cause__, RankError),
            )
        finally:
            self._is_running = False
            self._has_ended = True
            self._gate.notify()

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def watch(self, epoch: int) -> RankExit | None:
        """Wait until the steps have ended. Returns None after `stop`, else what broke the rank.

        The reference of this call is the rank's sign of life: it is answered only when the rank has ended. A failure
        is a plain answer because not every exception of a device library can be pickled.
        """
        self._gate.wait(epoch, lambda: self._has_ended)
        return self._exit

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def introduce(self) -> RankState:
        """Tell a driver that did not make this rank what it is."""
        return RankState(
            version=__version__,
            epoch=self._gate.epoch,
            incarnation=self._origin.incarnation,
            num_ranks=self._num_ranks,
            place=self.probe(),
            is_running=self._is_running,
            source=self._source,
            facts=None if self._engine is None else self._facts(self._engine),
        )

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def adopt(self, epoch: int, wake_id: int) -> int:
        """Obey the driver of `epoch` from now on. All earlier work is dropped, and what came of it.

        Returns a sequence index above all that the rank was ever given. What was being computed may still come as
        results, of lower indexes. `wake_id` must be the same for the whole group and newer than all before.
        """
        make = PrefillBatch if self.role == "prefill" else DecodeBatch
        with self._gate.advancing(epoch):
            self._loaded.post(make(batch_id=0, wake_id=wake_id, drops_all=True))
            self._loaded.take_results()
            self._orphan_watch.heard()
            self._logger.info("taken over by a new driver (epoch %d)", epoch)
            return self._next_index

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def hear_driver(self, epoch: int) -> None:
        """Note that the driver is alive, which does not poll yet."""
        with self._gate.passing(epoch):
            self._orphan_watch.heard()

    @ray.method(concurrency_group="inbox")  # type: ignore[untyped-decorator]
    def accept(self, epoch: int, data: bytes, *buffers: Buffer) -> None:
        """Put a batch into the engine's inbox; `buffers` are its hand-overs, in the order of the batch."""
        message = codec.decode(data)
        assert isinstance(message, PrefillBatch | DecodeBatch), type(message)
        with self._gate.passing(epoch):
            self._loaded.post(message, buffers)
            self._next_index = max(self._next_index, _end_index(message))

    @ray.method(concurrency_group="results")  # type: ignore[untyped-decorator]
    def next_results(self, epoch: int, gather_seconds: float) -> tuple[bytes, list[ObjectRef], RankProgress]:
        """Return what is new, as message bytes and the references of its hand-overs.

        Waits for the first news, and after it until `gather_seconds` since the call. Without any, the answer is empty
        after HEARTBEAT_SECONDS.
        """
        begin = time.monotonic()
        data: bytes = b""
        references: list[ObjectRef] = []
        with self._gate.passing(epoch):
            self._orphan_watch.heard()
        if self._news.wait(HEARTBEAT_SECONDS):
            time.sleep(max(0.0, gather_seconds - (time.monotonic() - begin)))
            with self._gate.passing(epoch):
                self._news.clear()  # before the results are taken: what comes later sets it again
                message, buffers = self._loaded.take_results()
                if message is not None:
                    data = codec.encode(message)
                    references = self._channel.publish(buffers)
        if self._recorder is not None:
            self._recorder.push()
        status = self._loaded.status()
        return data, references, RankProgress(step=status["step"], parked=status["parked"])

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def status(self) -> dict[str, Any]:
        """Return the phase and, once there is an engine, its numbers."""
        numbers = {} if self._engine is None else self._engine.status()
        return {"phase": self._phase, "kv_bytes_sent": self._channel.num_bytes, **numbers}

    @ray.method(concurrency_group="profile")  # type: ignore[untyped-decorator]
    def profile(self, num_steps: int, wait_seconds: float) -> StepProfile | None:
        """Profile the next steps while all other calls go on; see `RankEngine.profile`."""
        return self._loaded.profile(num_steps, wait_seconds)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stop(self, epoch: int) -> None:
        """End the step loop; `run` returns once all ranks of the group have agreed."""
        with self._gate.passing(epoch):
            if self._engine is not None:
                self._engine.stop()

    @property
    def _loaded(self) -> RankEngine:
        assert self._engine is not None, "called before setup"
        return self._engine

    def _enter(self, name: str) -> None:
        self._phase = name

    def _facts(self, engine: RankEngine) -> RankFacts:
        return RankFacts(
            ready=engine.ready,
            groups=engine.groups,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
        )

    def _end_orphan(self) -> None:
        """End this rank and, with the group's places in Ray, the other ranks of its group."""
        self._logger.error(
            "no driver for %g s (scheduler.orphan_timeout_seconds): the rank ends",
            self._origin.orphan_timeout_seconds,
        )
        places = get_current_placement_group()
        if places is not None:
            remove_placement_group(places)
        os._exit(1)


def _load(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _end_index(message: PrefillBatch | DecodeBatch) -> int:
    """Return an index above all sequences that `message` brings."""
    entries = message.requests if isinstance(message, PrefillBatch) else [entry.request for entry in message.admitted]
    return max((request.index + request.num_samples for request in entries), default=0)
