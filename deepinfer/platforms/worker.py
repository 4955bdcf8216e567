"""A stream as a daemon thread that takes pieces in order: what the platforms have in common."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_CLOSE_SECONDS = 10.0


class WorkerPiece(ABC, Generic[T]):
    """A piece of work of a `WorkerStream`; see `platform.Piece`."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Wrap `work`; nothing runs yet."""
        self._work: Callable[[], T] | None = work
        self._called = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> BaseException | None:
        """Call the work on the calling thread; returns what it raised."""
        assert self._work is not None, "a piece runs once"
        try:
            self._value = self._call(self._work)
        except BaseException as error:
            self._error = error
        self._work = None
        self._called.set()
        return self._error

    def fail(self, error: BaseException) -> None:
        """End the piece with `error` without running it."""
        self._error = error
        self._work = None
        self._called.set()

    def done(self) -> bool:
        """True when `result` does not wait any more."""
        return self._called.is_set() and self._has_ended()

    def result(self) -> T:
        """Wait for the piece and return what it returned, or raise what it raised."""
        self._called.wait()
        if self._error is not None:
            raise self._error
        self._wait_for_end()
        return self._value  # type: ignore[return-value]

    @abstractmethod
    def _call(self, work: Callable[[], T]) -> T:
        """Call `work` and note the times."""

    def _has_ended(self) -> bool:
        """Whether the device has done what the call launched."""
        return True

    def _wait_for_end(self) -> None:
        """Wait until the device has done what the call launched."""


class WorkerStream(ABC):
    """See `platform.Stream`; a subclass starts the thread when it is ready."""

    def __init__(self, name: str) -> None:
        """`name` names the thread."""
        self._pieces: queue.SimpleQueue[WorkerPiece[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._putting = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Take no more pieces, which fail from now on; waits until those submitted are done, 10 seconds at most."""
        with self._putting:
            self._is_closed = True
            self._pieces.put(None)
        self._thread.join(timeout=_CLOSE_SECONDS)

    def _put(self, piece: WorkerPiece[Any]) -> None:
        with self._putting:
            if not self._is_closed:
                self._pieces.put(piece)
                return
        piece.fail(RuntimeError(f"{self._thread.name} has been closed"))

    @abstractmethod
    def _work(self) -> None:
        """Prepare the thread, then `_run_all`."""

    def _run_all(self) -> BaseException | None:
        """Run pieces until `close`; returns what the first broken one raised."""
        broken: BaseException | None = None
        while (piece := self._pieces.get()) is not None:
            if broken is not None:
                piece.fail(broken)
            else:
                broken = piece.run()
            del piece  # its result may be large, and the next piece may be long in coming
        return broken
