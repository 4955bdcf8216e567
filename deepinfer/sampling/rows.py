"""The rows of a step that choose tokens, and whose they are."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deepinfer.platforms.transfer import to_device


@dataclass(slots=True, frozen=True)
class TokenRows:
    """R rows of scores; each chooses one token of a sequence.

    [R] int64: `slots` (0: inert), `seeds` of the sequences' samples, `positions` of the tokens to be chosen.
    `token_table` [S, L] int32: tokens of a slot by position; those before `positions[r]`, drafts under verification
    included, are row r's history.

    Few sequences have wishes that cost something, and the host knows which: `owners` are the slots of n sequences and
    `by_owner` [n, w] int64 the rows of each. A row may stand there more than once, and where an owner has no rows,
    rows of others do. `max_position`: no owner's row has a larger position.
    """

    slots: Tensor
    seeds: Tensor
    positions: Tensor
    token_table: Tensor
    owners: tuple[int, ...]
    by_owner: Tensor
    max_position: int

    def places(self, slots: Container[int]) -> list[int]:
        """Return the places of the owners that are in `slots`."""
        return [place for place, slot in enumerate(self.owners) if slot in slots]

    def take(self, by_owner: Tensor, places: list[int]) -> Tensor:
        """Return the entries of `by_owner` [n, w] at `places`, flat, one owner after the other."""
        return by_owner[to_device(np.array(places, np.int64), by_owner.device)].flatten()
