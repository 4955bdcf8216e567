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

    def __init__(
        self, work: Callable[[], T], stream: torch.cuda.Stream | None, after: torch.cuda.Event | None = None
    ) -> None:
        """Launch `work` on `stream` behind `after`, or else behind all of the current stream; None: on this stream."""
        self._work, self._end = work, None
        if stream is None:
            self._result = work()
            return
        stream.wait_event(torch.cuda.current_stream().record_event() if after is None else after)
        with torch.cuda.stream(stream):
            self._result = work()
            self._end = stream.record_event()

    def wait(self) -> T:
        """Return the result; what the calling stream launches next may read it. To be called as often as needed."""
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
        return self._result


class HeldWork(Generic[T]):
    """Side work that waits for a good moment.

    Kernels that fill the device keep those launched behind them waiting, however short these are. So what others wait
    for is to be launched first, even where the side work could have begun before: `ready` notes where it could.
    """

    def __init__(self, work: Callable[[], T], stream: torch.cuda.Stream | None) -> None:
        """`stream`: as of `SideWork`."""
        self._held, self._stream = work, stream
        self._after: torch.cuda.Event | None = None
        self._started: SideWork[T] | None = None

    def ready(self) -> None:
        """Note that the work needs nothing that is launched from here on.

        No result of this side stream may be given up between here and `start`: its memory would be the work's.
        """
        if self._stream is not None:
            self._after = torch.cuda.current_stream().record_event()

    def start(self) -> None:
        """Launch the work; it follows what had been launched when it was `ready`."""
        if self._started is None:
            self._started = SideWork(self._held, self._stream, self._after)

    def wait(self) -> T:
        """Start the work if it has not been, and return its result as `SideWork.wait` does."""
        self.start()
        assert self._started is not None, "started"
        return self._started.wait()


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
        return SideWork(work, self._usable())

    def hold(self, work: Callable[[], T]) -> HeldWork[T]:
        """The same, to be started later."""
        return HeldWork(work, self._usable())

    def _usable(self) -> torch.cuda.Stream | None:
        return self._stream if self._stream is not None and torch.cuda.is_current_stream_capturing() else None


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
