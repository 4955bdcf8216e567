"""How much of the time with work at hand the device was waiting for the host."""

from __future__ import annotations

from collections import deque


class IdleMeter:
    """Gaps between pieces of work on one stream, as a share of gaps and work, over the last `window` pieces.

    A gap counts only between two pieces of one stretch of work: `pause` ends a stretch, because a device without work
    is not kept waiting by anyone. Times are `time.monotonic()` seconds.
    """

    def __init__(self, window: int = 512) -> None:
        """Start with nothing seen."""
        self._spans: deque[tuple[float, float]] = deque(maxlen=window)  # (gap before, work)
        self._last_end: float | None = None

    def record(self, begin_seconds: float, end_seconds: float) -> None:
        """Count a piece; pieces come in the order in which they ran."""
        gap = 0.0 if self._last_end is None else max(0.0, begin_seconds - self._last_end)
        self._spans.append((gap, end_seconds - begin_seconds))
        self._last_end = end_seconds

    def pause(self) -> None:
        """The device has nothing to do from here on."""
        self._last_end = None

    @property
    def share(self) -> float:
        """0.0 (always busy, or nothing seen) to 1.0."""
        idle = sum(gap for gap, _ in self._spans)
        busy = sum(work for _, work in self._spans)
        return idle / (idle + busy) if idle + busy > 0.0 else 0.0
