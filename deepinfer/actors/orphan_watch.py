"""Notices that a rank has no driver any more. Ranks that outlive their driver must not hold their devices for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_MAX_CHECK_SECONDS = 5.0


class OrphanWatch:
    """How long the driver has been silent."""

    def __init__(self, timeout_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now."""
        self._timeout = timeout_seconds
        self._clock = clock
        self._heard_at = clock()

    def heard(self) -> None:
        """The driver has called."""
        self._heard_at = self._clock()

    def is_orphan(self) -> bool:
        """True when the driver has been silent for longer than the timeout."""
        return self._clock() - self._heard_at > self._timeout

    def start(self, end: Callable[[], None]) -> None:
        """Look from now on, on a thread of its own; `end` is called once, when the driver was silent for too long."""

        def look() -> None:
            while not self.is_orphan():
                time.sleep(min(self._timeout / 4, _MAX_CHECK_SECONDS))
            end()

        threading.Thread(target=look, name="orphan-watch", daemon=True).start()
