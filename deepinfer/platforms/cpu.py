"""The CPU as an accelerator, with one worker thread as the stream."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import psutil
import torch

from deepinfer.platforms.platform import MemoryInfo

T = TypeVar("T")
_CLOSE_SECONDS = 10.0


class CpuPiece(Generic[T]):
    """A piece of work of a `CpuStream`; see `platform.Piece`."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Wrap `work`; nothing runs yet."""
        self.begin_seconds = 0.0
        self.end_seconds = 0.0
        self._work: Callable[[], T] | None = work
        self._finished = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> BaseException | None:
        """Run the work on the calling thread; returns what it raised."""
        assert self._work is not None, "a piece runs once"
        self.begin_seconds = time.monotonic()
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self.end_seconds = time.monotonic()
        self._work = None
        self._finished.set()
        return self._error

    def fail(self, error: BaseException) -> None:
        """End the piece with `error` without running it."""
        self._error = error
        self._work = None
        self._finished.set()

    def done(self) -> bool:
        """True when `result` does not wait any more."""
        return self._finished.is_set()

    def result(self) -> T:
        """Wait for the piece and return what it returned, or raise what it raised."""
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class CpuStream:
    """An in-order executor on one daemon thread, whose torch operations use `num_threads` threads."""

    def __init__(self, name: str, *, num_threads: int) -> None:
        """Start the thread."""
        self._num_threads = num_threads
        self._pieces: queue.SimpleQueue[CpuPiece[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> CpuPiece[T]:
        """Put `work` behind all earlier pieces; returns at once."""
        piece = CpuPiece(work)
        self._pieces.put(piece)
        return piece

    def close(self) -> None:
        """Take no more pieces; waits until those submitted are done, 10 seconds at most."""
        self._pieces.put(None)
        self._thread.join(timeout=_CLOSE_SECONDS)

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        broken: BaseException | None = None
        while (piece := self._pieces.get()) is not None:
            if broken is not None:
                piece.fail(broken)
            else:
                broken = piece.run()
            del piece  # its result may be large, and the next piece may be long in coming


class CpuPlatform:
    """The host's processor; see `platform.Platform`."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, *, num_threads: int) -> None:
        """Use `num_threads` threads within one operation."""
        self._num_threads = num_threads

    def memory_info(self) -> MemoryInfo:
        """Return the host's memory; free is what the system would hand out without swapping."""
        memory = psutil.virtual_memory()
        own_bytes = psutil.Process().memory_info().rss
        return MemoryInfo(total_bytes=memory.total, free_bytes=memory.available, own_bytes=own_bytes)

    def open_stream(self, name: str) -> CpuStream:
        """Return a new stream; `name` names its thread."""
        return CpuStream(name, num_threads=self._num_threads)


def build_platform(*, num_threads: int) -> CpuPlatform:
    """Return the platform; `load_platform` calls this."""
    return CpuPlatform(num_threads=num_threads)
