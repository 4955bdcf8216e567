"""Hand-overs that lie in memory of prefill ranks, as the driver knows of them: who is to get which back, and when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class RankPiece:
    """A piece of prefill rank `rank`'s memory, under its `ticket`, in the `life` of the group that it belongs to."""

    rank: int
    ticket: int
    life: int
    is_released: bool = False


class PieceBook:
    """Each piece is held from its prefill result on, until nobody reads it: then it is released, once.

    `num_held`: pieces of the present group that are held.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.num_held = 0
        self._life = 0
        self._released: defaultdict[int, list[int]] = defaultdict(list)

    def hold(self, rank: int, ticket: int) -> RankPiece:
        """Enter a piece that a prefill rank has told of."""
        self.num_held += 1
        return RankPiece(rank, ticket, self._life)

    def release(self, piece: RankPiece | None) -> None:
        """Let the rank have a piece back; one of a group that is gone went with it."""
        if piece is None:
            return
        assert not piece.is_released, f"ticket {piece.ticket} of prefill rank {piece.rank} is released twice"
        piece.is_released = True
        if piece.life == self._life:
            self.num_held -= 1
            self._released[piece.rank].append(piece.ticket)

    def forget_all(self) -> None:
        """The prefill group is gone with its memory: what is still held or on its way back concerns nobody."""
        self._life += 1
        self.num_held = 0
        self._released.clear()

    def ranks(self) -> set[int]:
        """Return the ranks that have something to get back."""
        return set(self._released)

    def take(self, rank: int) -> list[int]:
        """Return the tickets that a rank gets back, to be sent to it."""
        return self._released.pop(rank, [])
