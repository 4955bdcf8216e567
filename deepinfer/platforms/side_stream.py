"""More streams within a recorded graph: work that nobody needs at once runs beside what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class SideWork(Generic[T]):
    """Work that has been launched.

    It holds on to `work`, and so to the tensors that this reads: as long as it lives, their memory is not given away.
    """

    def __init__(self, work: Callable[[], T], stream: torch.cuda.Stream | None) -> None:
        """Launch `work` on `stream`; None: on the current one."""
        self._work, self._end = work, None
        if stream is None:
            self._result = work()
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._result = work()
            self._end = stream.record_event()

    def wait(self) -> T:
        """Return the result; what the calling stream launches next may read it. To be called as often as needed."""
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
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

        Every start has its `wait` on the stream that records, before the graph ends.
        """
        if self._stream is None or not torch.cuda.is_current_stream_capturing():
            return SideWork(work, None)
        return SideWork(work, self._stream)


@dataclass(slots=True, frozen=True)
class SideStreams:
    """What a model's steps have beside their own stream, so that one kind of work does not queue behind another.

    `mixing`: needed behind a sublayer; `branch`: needed within it; `ahead`: needed by later layers.
    """

    mixing: SideStream
    branch: SideStream
    ahead: SideStream


def open_side_streams(device: torch.device) -> SideStreams:
    """Return side streams of `device`."""
    return SideStreams(SideStream(device), SideStream(device), SideStream(device))
