"""What the runtime needs to know of an accelerator, and the choice of one by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import torch

from deepinfer.errors import ConfigError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# name -> the module that has `build_platform(*, num_threads: int) -> Platform`
_MODULES: Final[dict[str, str]] = {"cpu": "deepinfer.platforms.cpu", "nvidia": "deepinfer.platforms.nvidia"}


@dataclass(slots=True, frozen=True)
class MemoryInfo:
    """Memory of the device in bytes.

    `free_bytes`: what a new allocation can take. `own_bytes`: what this process holds.
    """

    total_bytes: int
    free_bytes: int
    own_bytes: int


@dataclass(slots=True, frozen=True)
class SharedMemory:
    """`data` uint8 [num_bytes] on the device; with `handle` other processes of this host can open it.

    It is given back when nothing refers to `data` and `owner` any more.
    """

    data: torch.Tensor
    handle: bytes
    owner: object = None


class Piece(Protocol[T_co]):
    """One piece of work on a stream."""

    @property
    def begin_seconds(self) -> float:
        """When the device began it, in `time.monotonic()`; 0.0 until then, and if it never ran."""
        ...

    @property
    def end_seconds(self) -> float:
        """When the device was done with it, likewise. Known once this piece or a later one of its stream is done."""
        ...

    def done(self) -> bool:
        """True when `result` does not wait any more."""
        ...

    def result(self) -> T_co:
        """Wait for the piece and return what it returned, or raise what it raised."""
        ...


class Stream(Protocol):
    """Runs pieces one after the other, in the order of `submit`, beside the caller.

    When a piece raises, the stream is broken: every later piece raises the same exception without being run, because
    what it would read may not have been written.
    """

    def submit(self, work: Callable[[], T]) -> Piece[T]:
        """Put `work` behind all earlier pieces; returns at once."""
        ...

    def close(self) -> None:
        """Take no more pieces and end once those submitted are done; waits a bounded time for that."""
        ...


class Platform(Protocol):
    """One accelerator: its device, memory, streams and graphs.

    `has_graphs`: `capture` saves launches, so that it pays to run work of a few fixed shapes.
    """

    name: str
    device: torch.device
    has_graphs: bool

    def memory_info(self) -> MemoryInfo:
        """Return the device's memory as it is now."""
        ...

    def open_stream(self, name: str) -> Stream:
        """Return a new stream; `name` names its thread."""
        ...

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return what does `work` again: the same operations on the same tensors, whatever these hold by then.

        To be called, like what it returns, on the thread of one stream. `work` may be run, reads and writes tensors
        that stay where they are, and neither waits for the device nor has shapes that depend on it. What the returned
        function returns is overwritten by its next call.
        """
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return how much device memory `work` needs beside what is held already, by running it; 0: not known."""
        ...

    def share_memory(self, num_bytes: int) -> SharedMemory:
        """Allocate memory on the device that other processes can read; what it holds is undefined.

        Raises OSError or RuntimeError where there is none, or no way to share it.
        """
        ...

    def open_memory(self, handle: bytes) -> torch.Tensor:
        """Map what another process of this host shares: uint8, as it is, whatever happens to that process from then on.

        It is unmapped when nothing refers to it any more. To be called on the thread of a stream. Raises
        `memory_handle.UnreachableMemoryError`.
        """
        ...


def detect_accelerator() -> str:
    """Return the best accelerator of this machine: "nvidia" when torch can use one, else "cpu"."""
    return "nvidia" if torch.cuda.is_available() else "cpu"


def load_platform(name: str, *, num_threads: int = 1) -> Platform:
    """Return the platform `name`; `num_threads` bounds the threads of a CPU operation.

    Raises ConfigError for a platform that is not built.
    """
    if name not in _MODULES:
        raise ConfigError(f"{name!r} is not available yet; use one of: {', '.join(_MODULES)}", path="accelerator")
    platform: Platform = importlib.import_module(_MODULES[name]).build_platform(num_threads=num_threads)
    return platform
