"""How far a rank's load is, in words that change a few times a minute, not at every piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from deepinfer.models.checkpoint_reads import LoadProgress

_TELL_SECONDS = 2.0


def describe(progress: LoadProgress) -> str:
    """Return bytes of bytes, rate and the time left, for example
    "loading weights: 3.1 of 13.4 GiB, 105 MB/s, 0:01:40 left".
    """
    amount = f"{progress.what}: {progress.done_bytes / 2**30:.1f} of {progress.total_bytes / 2**30:.1f} GiB"
    if progress.done_bytes == 0 or progress.seconds <= 0:
        return amount
    rate = progress.done_bytes / progress.seconds
    left = timedelta(seconds=round((progress.total_bytes - progress.done_bytes) / rate))
    return f"{amount}, {rate / 1e6:.0f} MB/s, {left} left"


class LoadReporter:
    """Hands on progress in words to `tell`, at most every two seconds; the end of each part is logged."""

    def __init__(self, tell: Callable[[str], None], log: Callable[[str], None]) -> None:
        """`tell` is shown while the load runs, `log` is kept."""
        self._tell, self._log = tell, log
        self._told = float("-inf")

    def __call__(self, progress: LoadProgress) -> None:
        """Take note of `progress`; see `checkpoint_reads.OnProgress`."""
        if progress.done_bytes == progress.total_bytes:
            rate = progress.total_bytes / max(progress.seconds, 1e-9)
            self._log(
                f"{progress.what}: {progress.total_bytes / 2**30:.2f} GiB in {progress.seconds:.1f} s, "
                f"{rate / 1e6:.0f} MB/s"
            )
        elif time.monotonic() - self._told >= _TELL_SECONDS:
            self._told = time.monotonic()
            self._tell(describe(progress))
