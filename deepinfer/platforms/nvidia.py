"""An NVIDIA GPU as an accelerator: CUDA streams, and a clear refusal of what can't work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import torch

from deepinfer.errors import ConfigError
from deepinfer.log import get_logger
from deepinfer.platforms.memory_handle import describe_memory, read_handle, unreachable
from deepinfer.platforms.platform import MemoryInfo, SharedMemory
from deepinfer.platforms.worker import WorkerPiece, WorkerStream

T = TypeVar("T")
_MIN_CUDA: Final = (12, 8)
_TESTED: Final = ((9, 0),)
_UNTESTED: Final = ((10, 0), (10, 3))  # the kernels are written for them, nobody has run them there

_log = get_logger("platform")


class CudaClock:
    """Turns CUDA events into `time.monotonic()` seconds; made on the device's thread."""

    def __init__(self) -> None:
        """Wait until the device is idle, and take the time."""
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._base_seconds = time.monotonic()

    def seconds(self, event: torch.cuda.Event) -> float:
        """The time at which a finished event happened; good to about a tenth of a millisecond."""
        milliseconds: float = self._base.elapsed_time(event)
        return self._base_seconds + milliseconds / 1000


class CudaPiece(WorkerPiece[T]):
    """A piece of work of a `CudaStream`; see `platform.Piece`. It ends when the device has done it."""

    def __init__(self, work: Callable[[], T], clock: Callable[[], CudaClock]) -> None:
        """Wrap `work`; nothing runs yet. `clock` is asked on the thread that runs it."""
        super().__init__(work)
        self._find_clock = clock
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._clock: CudaClock | None = None

    def _call(self, work: Callable[[], T]) -> T:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        value = work()
        end.record()
        self._clock, self._events = self._find_clock(), (begin, end)
        return value

    def _has_ended(self) -> bool:
        return self._events is None or bool(self._events[1].query())

    def _wait_for_end(self) -> None:
        assert self._events is not None, "launched without an error"
        self._events[1].synchronize()

    @property
    def begin_seconds(self) -> float:
        """See `platform.Piece`."""
        return 0.0 if self._events is None else self._seconds(self._events[0])

    @property
    def end_seconds(self) -> float:
        """See `platform.Piece`."""
        return 0.0 if self._events is None else self._seconds(self._events[1])

    def _seconds(self, event: torch.cuda.Event) -> float:
        assert self._clock is not None, "set together with the events"
        return self._clock.seconds(event) if event.query() else 0.0


class CudaStream(WorkerStream):
    """A CUDA stream with a daemon thread that launches the pieces in order; the device may lag behind the thread."""

    def __init__(self, name: str, device: torch.device, *, num_threads: int) -> None:
        """Start the thread; what was launched on other streams before is done first."""
        super().__init__(name)
        torch.cuda.synchronize(device)
        self._device, self._num_threads = device, num_threads
        self._clock: CudaClock | None = None
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> CudaPiece[T]:
        """Put `work` behind all earlier pieces; returns at once."""
        piece = CudaPiece(work, self._own_clock)
        self._put(piece)
        return piece

    def _own_clock(self) -> CudaClock:
        assert self._clock is not None, "the thread makes it before the first piece"
        return self._clock

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            self._clock = CudaClock()
            if self._run_all() is None:
                stream.synchronize()


class NvidiaPlatform:
    """The first visible GPU; see `platform.Platform`."""

    name = "nvidia"
    has_graphs = True

    def __init__(self, device: torch.device, *, num_threads: int) -> None:
        """Use `device`, and `num_threads` threads within one operation on the host."""
        self.device = device
        self._num_threads = num_threads
        self._pool = torch.cuda.graph_pool_handle()

    def memory_info(self) -> MemoryInfo:
        """Return the GPU's memory; what torch keeps for reuse counts as free."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        own_bytes = torch.cuda.memory_allocated(self.device)
        kept_bytes = torch.cuda.memory_reserved(self.device) - own_bytes
        return MemoryInfo(total_bytes=total_bytes, free_bytes=free_bytes + kept_bytes, own_bytes=own_bytes)

    def open_stream(self, name: str) -> CudaStream:
        """Return a new stream; `name` names its thread."""
        return CudaStream(name, self.device, num_threads=self._num_threads)

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run `work` once, so that its kernels are compiled, then record it as a CUDA graph.

        All graphs share one pool of memory: only one of them may run at a time, in one stream.
        """
        stream = torch.cuda.current_stream(self.device)
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may look at events meanwhile
        recording = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with _no_collection(), recording:
            result = work()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work` and return how much more memory it held at its peak than before."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before_bytes = torch.cuda.memory_allocated(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before_bytes

    def share_memory(self, num_bytes: int) -> SharedMemory:
        """Return memory with CUDA's handle for other processes, whichever GPU they use."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        return SharedMemory(data, describe_memory(num_bytes, *data.untyped_storage()._share_cuda_()))

    def open_memory(self, handle: bytes) -> torch.Tensor:
        """Map another process's memory; the first part of CUDA's handle numbers the GPU as its owner does."""
        owner = read_handle(handle)
        try:
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *owner.details[1:])  # noqa: SLF001
        except RuntimeError as error:
            raise unreachable(owner, error) from error
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (owner.num_bytes,), (1,))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: what its end does to the device may break what is being recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_build(cuda_version: str | None) -> None:
    """Raise ConfigError unless torch was built for a CUDA version that these chips need."""
    if cuda_version is None:
        raise ConfigError("this torch was built without CUDA; install deepinfer[nvidia]", path="accelerator")
    found = tuple(int(part) for part in cuda_version.split(".")[:2])
    if found < _MIN_CUDA:
        wanted = ".".join(map(str, _MIN_CUDA))
        raise ConfigError(f"this torch was built for CUDA {cuda_version}; {wanted} is the oldest", path="accelerator")


def check_chip(name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a chip that the kernels are not written for; warn about one where they were never run."""
    shown = ".".join(map(str, capability))
    if capability in _UNTESTED:
        _log.warning("%s (compute capability %s): nobody has tested the kernels on this chip", name, shown)
    elif capability not in _TESTED:
        known = ", ".join(f"{major}.{minor}" for major, minor in _TESTED + _UNTESTED)
        raise ConfigError(
            f"{name} has compute capability {shown}; the kernels are written for {known}. Use such a GPU, or 'cpu'",
            path="accelerator",
        )


def _first_device() -> torch.device:
    try:
        torch.cuda.init()
        device = torch.device("cuda", torch.cuda.current_device())
        check_chip(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        torch.ones(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"no GPU can be used: {error}; is the driver new enough?", path="accelerator") from error
    return device


def build_platform(*, num_threads: int) -> NvidiaPlatform:
    """Return the platform of the first visible GPU; `load_platform` calls this. Raises ConfigError."""
    check_build(torch.version.cuda)
    device = _first_device()
    torch.cuda.set_device(device)
    # cuBLAS may otherwise add partial sums in bf16: the contract of every linear map is float32 sums
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return NvidiaPlatform(device, num_threads=num_threads)
