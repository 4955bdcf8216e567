"""Notices ranks that hang: Ray sees a dead process, but not one that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable

from deepinfer.actors.rank_life import RankProgress


class StallWatch:
    """Deadlines of one group's ranks: an answer, and a new step while there is work, within `timeout_seconds`."""

    def __init__(self, num_ranks: int, *, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start all deadlines now."""
        self._timeout = timeout_seconds
        self._clock = clock
        self._answered = [clock()] * num_ranks
        self._moved = [clock()] * num_ranks
        self._steps = [-1] * num_ranks

    def seen(self, rank: int, progress: RankProgress) -> None:
        """Note an answer of `rank`."""
        now = self._clock()
        self._answered[rank] = now
        if progress.parked or progress.step != self._steps[rank]:
            self._moved[rank] = now
            self._steps[rank] = progress.step

    def stalled(self) -> tuple[int, str] | None:
        """Return the rank to blame and what is wrong with it, or None.

        A rank that stopped answering comes first: the others of its group then stand in the same step, waiting for it.
        """
        now = self._clock()
        for times, text in ((self._answered, "has not answered"), (self._moved, "has not ended step {step}")):
            oldest = min(range(len(times)), key=times.__getitem__)
            seconds = now - times[oldest]
            if seconds > self._timeout:
                what = text.format(step=self._steps[oldest])
                return oldest, f"{what} for {seconds:.1f} s (scheduler.step_timeout_seconds is {self._timeout:g})"
        return None
