"""Which custom_ids were seen: 8 bytes a row, so that millions of rows need no set of strings."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_RECENT = 65_536


class KnownIds:
    """A growing set of strings, kept as 64-bit digests in a few sorted arrays of falling size.

    Two different strings count as equal with a chance of n^2 / 2^65: 3 in a million for ten million rows.
    """

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._runs: list[NDArray[np.uint64]] = []

    def add(self, custom_id: str) -> bool:
        """Add `custom_id`; return False when it was there already."""
        key = int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "little")
        if key in self._recent or any(self._contains(run, key) for run in self._runs):
            return False
        self._recent.add(key)
        if len(self._recent) == _RECENT:
            self._pack()
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed part; the recent part stays below 8 MiB."""
        return sum(run.nbytes for run in self._runs)

    @staticmethod
    def _contains(run: NDArray[np.uint64], key: int) -> bool:
        place = int(run.searchsorted(np.uint64(key)))
        return place < len(run) and int(run[place]) == key

    def _pack(self) -> None:
        run = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
        run.sort()
        self._recent.clear()
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.concatenate((self._runs.pop(), run))
            run.sort(kind="stable")
        self._runs.append(run)
