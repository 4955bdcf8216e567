"""An NVIDIA GPU as an accelerator: CUDA streams, and a clear refusal of what can't work."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import torch

from deepinfer.errors import ConfigError
from deepinfer.log import get_logger
from deepinfer.platforms.platform import MemoryInfo

T = TypeVar("T")
_CLOSE_SECONDS = 10.0
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


class CudaPiece(Generic[T]):
    """A piece of work of a `CudaStream`; see `platform.Piece`. It ends when the device has done it."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Wrap `work`; nothing runs yet."""
        self._work: Callable[[], T] | None = work
        self._launched = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._clock: CudaClock | None = None

    def run(self, clock: CudaClock) -> BaseException | None:
        """Call the work on the calling thread, between two events of its stream; returns what it raised."""
        assert self._work is not None, "a piece runs once"
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            begin.record()
            self._value = self._work()
            end.record()
            self._clock, self._events = clock, (begin, end)
        except BaseException as error:
            self._error = error
        self._work = None
        self._launched.set()
        return self._error

    def fail(self, error: BaseException) -> None:
        """End the piece with `error` without running it."""
        self._error = error
        self._work = None
        self._launched.set()

    def done(self) -> bool:
        """True when `result` does not wait any more."""
        if not self._launched.is_set():
            return False
        return self._events is None or bool(self._events[1].query())

    def result(self) -> T:
        """Wait for the host's and the device's part, and return what the work returned, or raise what it raised."""
        self._launched.wait()
        if self._error is not None:
            raise self._error
        assert self._events is not None, "launched without an error"
        self._events[1].synchronize()
        return self._value  # type: ignore[return-value]

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


class CudaStream:
    """A CUDA stream with a daemon thread that launches the pieces in order; the device may lag behind the thread."""

    def __init__(self, name: str, device: torch.device, *, num_threads: int) -> None:
        """Start the thread; what was launched on other streams before is done first."""
        torch.cuda.synchronize(device)
        self._device, self._num_threads = device, num_threads
        self._pieces: queue.SimpleQueue[CudaPiece[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> CudaPiece[T]:
        """Put `work` behind all earlier pieces; returns at once."""
        piece = CudaPiece(work)
        self._pieces.put(piece)
        return piece

    def close(self) -> None:
        """Take no more pieces; waits until those submitted are done, 10 seconds at most."""
        self._pieces.put(None)
        self._thread.join(timeout=_CLOSE_SECONDS)

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        broken: BaseException | None = None
        with torch.cuda.stream(stream):
            clock = CudaClock()
            while (piece := self._pieces.get()) is not None:
                if broken is not None:
                    piece.fail(broken)
                else:
                    broken = piece.run(clock)
                del piece  # its result may be large, and the next piece may be long in coming
            if broken is None:
                stream.synchronize()


class NvidiaPlatform:
    """The first visible GPU; see `platform.Platform`."""

    name = "nvidia"

    def __init__(self, device: torch.device, *, num_threads: int) -> None:
        """Use `device`, and `num_threads` threads within one operation on the host."""
        self.device = device
        self._num_threads = num_threads

    def memory_info(self) -> MemoryInfo:
        """Return the GPU's memory; what torch keeps for reuse counts as free."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        own_bytes = torch.cuda.memory_allocated(self.device)
        kept_bytes = torch.cuda.memory_reserved(self.device) - own_bytes
        return MemoryInfo(total_bytes=total_bytes, free_bytes=free_bytes + kept_bytes, own_bytes=own_bytes)

    def open_stream(self, name: str) -> CudaStream:
        """Return a new stream; `name` names its thread."""
        return CudaStream(name, self.device, num_threads=self._num_threads)


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
