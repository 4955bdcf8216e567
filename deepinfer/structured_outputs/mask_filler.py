"""Fills the masks of a step's sequences on several threads.

The engine fills a mask without Python's lock, so threads of ours help, and a sequence's masks depend on nothing but
itself: they are the same however many threads there are. xgrammar's own `BatchGrammarMatcher` starts its threads anew
in every call and can't follow drafts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from deepinfer.structured_outputs.grammar import SequenceGrammar

MAX_THREADS = 8
MIN_ROWS_PER_THREAD = 16  # below, handing over costs more than it saves


class MaskFiller:
    """One thread uses it and works along; the others sleep between steps."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads`, the caller's included; None: those that this process may run on, at most `MAX_THREADS`."""
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(max(1, self._num_threads - 1), thread_name_prefix="masks")

    def fill(
        self, grammars: Sequence[SequenceGrammar], drafts: Sequence[Sequence[int]], words: torch.Tensor
    ) -> list[int]:
        """Fill `words` [n, 1 + K, W] int32 for `grammars` (all different) and return how many `drafts` of each hold.

        Entry i is as `SequenceGrammar.fill` leaves it; rows behind the drafts that hold repeat the last mask, since
        no draft there can be accepted and no row is ever free.
        """
        num_rows = sum(1 + len(tokens) for tokens in drafts)
        num_parts = max(1, min(self._num_threads, num_rows // MIN_ROWS_PER_THREAD))
        parts = [range(part, len(grammars), num_parts) for part in range(num_parts)]
        counts = [0] * len(grammars)

        def fill_part(places: range) -> None:
            for place in places:
                rows = words[place]
                num_valid = counts[place] = grammars[place].fill(rows, drafts[place])
                rows[num_valid + 1 :] = rows[num_valid]

        helpers = [self._pool.submit(fill_part, places) for places in parts[1:]]
        fill_part(parts[0])
        for helper in helpers:
            helper.result()
        return counts
