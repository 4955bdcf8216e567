"""Decode steps of fixed shapes: a step is padded to the next larger one, whose launches were recorded before.

A tier is a number of sequences and of rows. Its inputs, the slots and how many drafts each runs, lie in tensors of its
own; all else that a step reads and writes is the slot table and the caches.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

from deepinfer.log import get_logger
from deepinfer.runtime.batch_inputs import DecodeRows

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
_SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_SIZE_STEP = 64  # above the small ones
_LOGGER = get_logger("graphs")


def tier_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return the numbers of sequences that steps are padded to, ascending, up to `max_sequences`."""
    large = range(_SMALL_SIZES[-1] + _SIZE_STEP, max_sequences, _SIZE_STEP)
    return (*(size for size in (*_SMALL_SIZES, *large) if size < max_sequences), max_sequences)


class StepGraphs:
    """Recorded steps by what is run (`work`, a function of decode rows) and tier. Only the device thread uses it."""

    def __init__(self, capture: Capture, *, max_sequences: int, max_drafts: int, device: torch.device) -> None:
        """`capture` is that of the platform."""
        self.sizes = tier_sizes(max_sequences)
        self._capture = capture
        self._max_drafts = max_drafts
        self._device = device
        self._rows: dict[tuple[int, int], DecodeRows] = {}
        self._replays: dict[tuple[str, int, int], Callable[[], Any]] = {}

    def record_largest(self, name: str, work: Callable[[DecodeRows], object]) -> None:
        """Record `work` with all sequences and drafts. What it needs serves the other tiers too: they share memory."""
        self._recorded(name, work, self.sizes[-1], self._max_drafts)

    def run(self, name: str, work: Callable[[DecodeRows], Any], wanted: DecodeRows) -> Any:
        """Return `work` of the smallest tier that holds the `wanted` rows of at least one sequence.

        It is recorded under `name` the first time. What it returns is overwritten by the next step.
        """
        count = len(wanted.slots)
        size = self.sizes[bisect_left(self.sizes, count)]
        drafts_per_slot = -(-wanted.num_rows // count) - 1
        replay = self._recorded(name, work, size, drafts_per_slot)
        rows = self._rows[size, drafts_per_slot]
        rows.slots[:count] = wanted.slots
        rows.num_drafts[:count] = wanted.num_drafts
        rows.slots[count:].zero_()
        rows.num_drafts[count:].fill_(-1)
        return replay()

    def _recorded(
        self, name: str, work: Callable[[DecodeRows], Any], size: int, drafts_per_slot: int
    ) -> Callable[[], Any]:
        """To record is to run: with rows that are all padding."""
        key = name, size, drafts_per_slot
        if key not in self._replays:
            rows = self._rows.setdefault((size, drafts_per_slot), self._empty_rows(size, drafts_per_slot))
            rows.slots.zero_()
            rows.num_drafts.fill_(-1)
            begin = time.monotonic()
            self._replays[key] = self._capture(lambda: work(rows))
            seconds = time.monotonic() - begin
            _LOGGER.info("recorded steps (%s) of %d sequences, %d rows in %.1f s", name, size, rows.num_rows, seconds)
        return self._replays[key]

    def _empty_rows(self, size: int, drafts_per_slot: int) -> DecodeRows:
        slots = torch.zeros(size, dtype=torch.int64, device=self._device)
        return DecodeRows(slots, torch.full_like(slots, -1), size * (1 + drafts_per_slot))
