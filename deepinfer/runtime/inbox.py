"""Where other threads leave messages for the step thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from deepinfer.protocol import DecodeBatch, PrefillBatch, RequestFailure
from deepinfer.runtime.kv_transfer import HeldKV


@dataclass(slots=True, frozen=True)
class Posted:
    """A message; `buffers` belong to the admitted requests of a decode batch, None for each in `failures`."""

    message: PrefillBatch | DecodeBatch
    buffers: tuple[HeldKV | None, ...] = ()
    failures: tuple[RequestFailure, ...] = ()


class Inbox:
    """A queue with one reader, which can wait for a message or for the order to stop."""

    def __init__(self) -> None:
        """Start empty."""
        self._changed = threading.Condition()
        self._posted: list[Posted] = []
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping

    def put(self, posted: Posted) -> None:
        """Leave a message; any thread."""
        with self._changed:
            self._posted.append(posted)
            self._changed.notify()

    def stop(self) -> None:
        """Tell the reader to end; any thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def take(self) -> list[Posted]:
        """Return what has come since the last call; returns at once."""
        with self._changed:
            posted, self._posted = self._posted, []
        return posted

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when there is a message to take or the order to stop, or after `timeout_seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._posted or self._stopping, timeout=timeout_seconds)
