"""The CPU as an accelerator, with one worker thread as the stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil
import torch

from deepinfer.platforms.host_memory import host_memory
from deepinfer.platforms.platform import MemoryInfo, SharedMemory
from deepinfer.platforms.shared_pages import open_pages, share_pages
from deepinfer.platforms.worker import WorkerPiece, WorkerStream

T = TypeVar("T")


class CpuPiece(WorkerPiece[T]):
    """A piece of work of a `CpuStream`; see `platform.Piece`."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Wrap `work`; nothing runs yet."""
        super().__init__(work)
        self.begin_seconds = 0.0
        self.end_seconds = 0.0

    def _call(self, work: Callable[[], T]) -> T:
        self.begin_seconds = time.monotonic()
        try:
            return work()
        finally:
            self.end_seconds = time.monotonic()


class CpuStream(WorkerStream):
    """An in-order executor on one daemon thread, whose torch operations use `num_threads` threads."""

    def __init__(self, name: str, *, num_threads: int) -> None:
        """Start the thread."""
        super().__init__(name)
        self._num_threads = num_threads
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> CpuPiece[T]:
        """Put `work` behind all earlier pieces; returns at once."""
        piece = CpuPiece(work)
        self._put(piece)
        return piece

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        self._run_all()


class CpuPlatform:
    """The host's processor; see `platform.Platform`."""

    name = "cpu"
    device = torch.device("cpu")
    has_graphs = False

    def __init__(self, *, num_threads: int) -> None:
        """Use `num_threads` threads within one operation."""
        self._num_threads = num_threads

    def memory_info(self) -> MemoryInfo:
        """Return the host's memory; free is what the system would hand out without swapping, or a container's limit."""
        memory = host_memory()
        own_bytes = psutil.Process().memory_info().rss
        return MemoryInfo(total_bytes=memory.total_bytes, free_bytes=memory.free_bytes, own_bytes=own_bytes)

    def open_stream(self, name: str) -> CpuStream:
        """Return a new stream; `name` names its thread."""
        return CpuStream(name, num_threads=self._num_threads)

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return `work` itself: there is nothing to save."""
        return work

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work` and return 0: the host's memory is not counted so closely."""
        work()
        return 0

    def share_memory(self, num_bytes: int) -> SharedMemory:
        """Return memory in a file without a name."""
        return share_pages(num_bytes)

    def open_memory(self, handle: bytes) -> torch.Tensor:
        """Map the file of another process, or of this one."""
        return open_pages(handle)


def build_platform(*, num_threads: int) -> CpuPlatform:
    """Return the platform; `load_platform` calls this."""
    return CpuPlatform(num_threads=num_threads)
