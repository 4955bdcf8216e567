"""The thin shell around a rank that both roles share: start in phases, one step thread, an inbox and an outbox.

Ray's methods only put into the engine's inbox or read from its outbox. They run in groups of threads of their own, so
that each kind of call always gets an answer: `loop` (the step thread), `inbox`, `results` and `control`. Calls of one
caller are started in the order in which they were made.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
import ray
from ray import ObjectRef

from deepinfer import codec
from deepinfer.actors.kv_channel import Buffer, KVChannel
from deepinfer.actors.ray_metrics import RayRecorder
from deepinfer.config import decode_config
from deepinfer.errors import RankError
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.log import get_logger, phase, set_up_logging
from deepinfer.protocol import DecodeBatch, DecodeResult, PrefillBatch, PrefillResult, RankReady, Role, StepProfile

CONCURRENCY_GROUPS = {"loop": 1, "inbox": 1, "results": 1, "control": 1, "profile": 1}
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


class RankProgram(msgspec.Struct, frozen=True, kw_only=True):
    """The code that a rank runs, as "module:function": it is loaded in the rank only, because it may import torch.

    `build(config, *, role, rank, num_ranks, model_directory, store_address, recorder, on_phase)` returns a RankEngine;
    `open_store(host)` returns a rendezvous (kept alive by its rank) and its port.
    """

    build: str = "deepinfer.runtime.build:build_rank_engine"
    open_store: str = "deepinfer.distributed.process_groups:open_store"


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs."""

    node_id: str
    address: str
    pid: int
    device_ids: tuple[str, ...]


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded rank tells the driver: its sizes and digests, and the model's numbers."""

    ready: RankReady
    groups: tuple[KVGroup, ...]
    vocab_size: int
    max_model_len: int


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """What broke a rank. `blames_peer`: it only noticed that another rank of its group is gone."""

    cause: str
    trace: str
    blames_peer: bool


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The last step that a rank began, and whether it waits without work."""

    step: int
    parked: bool


class RankActor:
    """One rank. Life: `__init__` (cheap), `probe`, `load_code`, `open_store` on rank 0, `setup`, then `run`."""

    role: ClassVar[Role]

    def __init__(self, name: str, rank: int, num_ranks: int, log_level: str) -> None:
        """Remember who this is; nothing is loaded."""
        set_up_logging(log_level)
        self._name = name
        self._rank = rank
        self._num_ranks = num_ranks
        self._logger = get_logger(f"{self.role}-{rank}")
        self._phase = "placed"
        self._channel = KVChannel()
        self._news = threading.Event()
        self._engine: RankEngine | None = None
        self._recorder: RayRecorder | None = None
        self._store: Any = None

    def __repr__(self) -> str:
        """Name shown by Ray's dashboard and in its logs."""
        return f"{type(self).__name__}(rank={self._rank}, of={self._num_ranks}, engine={self._name})"

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
    def setup(
        self, config: bytes, model_directory: str, store_address: tuple[str, int] | None, program: RankProgram
    ) -> RankFacts:
        """Meet the other ranks at `store_address` and load the weights."""
        settings = decode_config(config)
        interval = settings.observability.metrics_interval_seconds
        self._recorder = RayRecorder(role=self.role, rank=self._rank, interval_seconds=interval)
        self._enter("setting up")
        engine: RankEngine = _load(program.build)(
            settings,
            role=self.role,
            rank=self._rank,
            num_ranks=self._num_ranks,
            model_directory=model_directory,
            store_address=store_address,
            recorder=self._recorder,
            on_phase=self._enter,
        )
        engine.results_ready = self._news.set
        self._engine = engine
        self._enter("ready")
        return RankFacts(
            ready=engine.ready,
            groups=engine.groups,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
        )

    @ray.method(concurrency_group="loop")  # type: ignore[untyped-decorator]
    def run(self) -> RankExit | None:
        """Run steps until `stop`. Returns None then, else what broke the rank.

        The reference of this call is the rank's sign of life: it is answered only when the rank has ended. A failure
        is a plain answer because not every exception of a device library can be pickled.
        """
        try:
            self._loaded.run()
        except Exception as error:
            self._logger.exception("broken")
            return RankExit(
                cause=error.message if isinstance(error, RankError) else f"{type(error).__name__}: {error}",
                trace=traceback.format_exc(),
                blames_peer=isinstance(error.__cause__, RankError),
            )
        return None

    @ray.method(concurrency_group="inbox")  # type: ignore[untyped-decorator]
    def accept(self, data: bytes, *buffers: Buffer) -> None:
        """Put a batch into the engine's inbox; `buffers` are its hand-overs, in the order of the batch."""
        message = codec.decode(data)
        assert isinstance(message, PrefillBatch | DecodeBatch), type(message)
        self._loaded.post(message, buffers)

    @ray.method(concurrency_group="results")  # type: ignore[untyped-decorator]
    def next_results(self, gather_seconds: float) -> tuple[bytes, list[ObjectRef], RankProgress]:
        """Return what is new, as message bytes and the references of its hand-overs.

        Waits for the first news, and after it until `gather_seconds` since the call. Without any, the answer is empty
        after HEARTBEAT_SECONDS.
        """
        begin = time.monotonic()
        data: bytes = b""
        references: list[ObjectRef] = []
        if self._news.wait(HEARTBEAT_SECONDS):
            time.sleep(max(0.0, gather_seconds - (time.monotonic() - begin)))
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
    def stop(self) -> None:
        """End the step loop; `run` returns once all ranks of the group have agreed."""
        if self._engine is not None:
            self._engine.stop()

    @property
    def _loaded(self) -> RankEngine:
        assert self._engine is not None, "called before setup"
        return self._engine

    def _enter(self, name: str) -> None:
        self._phase = name


def _load(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
