"""A second stream within a recorded graph: work that nobody needs at once runs beside what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class SideWork(Generic[T]):
    """Work that has been launched.

    It holds on to `work`, and so to the tensors that this reads: their memory is not given away before `wait`.
    """

    def __init__(self, work: Callable[[], T], stream: torch.cuda.Stream | None) -> None:
        """Launch `work` on `stream`; None: on the current one."""
        self._work, self._stream = work, stream
        if stream is None:
            self._result = work()
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._result = work()

    def wait(self) -> T:
        """Return the work's result, to be called on the stream that started it; what is launched next may read it."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._result


class SideStream:
    """Starts work beside the stream that records a graph. The same kernels run on the same values: no bits change.

    Outside of a graph, and on a CPU, the work runs in line: there the host's launches are what takes time, and a second
    stream costs more of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, work: Callable[[], T]) -> SideWork[T]:
        """Launch `work`, which reads what was launched before and writes nothing that others read before its `wait`.

        Every start has its `wait` before the graph ends.
        """
        if self._stream is None or not torch.cuda.is_current_stream_capturing():
            return SideWork(work, None)
        return SideWork(work, self._stream)
