"""Pieces of one region of memory: which part of it is free, and what is given away under which ticket."""

from __future__ import annotations

import secrets
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from deepinfer.platforms.platform import SharedMemory

ALIGNMENT: Final = 256  # of where pieces begin and how long they are, in bytes


def padded(num_bytes: int) -> int:
    """Return how long a piece for `num_bytes` is; one for nothing has a length too."""
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT


class PieceAllocator:
    """First fit over `num_bytes` bytes; neighbours that are free become one. Neither torch nor threads."""

    def __init__(self, num_bytes: int) -> None:
        """Start with all of it free, down to a whole number of ALIGNMENT."""
        self._free: list[tuple[int, int]] = []  # (offset, length), ascending, never touching each other
        self._held: dict[int, int] = {}  # offset -> length
        if num_bytes >= ALIGNMENT:
            self._free.append((0, num_bytes // ALIGNMENT * ALIGNMENT))

    @property
    def num_free_bytes(self) -> int:
        """Bytes that no piece has."""
        return sum(length for _, length in self._free)

    def take(self, num_bytes: int) -> int | None:
        """Return where a piece of `padded(num_bytes)` begins; None: nowhere is so much free at once."""
        wanted = padded(num_bytes)
        for place, (offset, length) in enumerate(self._free):
            if length >= wanted:
                self._free[place : place + 1] = [(offset + wanted, length - wanted)] if length > wanted else []
                self._held[offset] = wanted
                return offset
        return None

    def give(self, offset: int) -> None:
        """Take back the piece that begins at `offset`."""
        start, end = offset, offset + self._held.pop(offset)
        place = bisect_left(self._free, (start, 0))
        if place < len(self._free) and self._free[place][0] == end:
            end += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == start:
            start = self._free.pop(place - 1)[0]
        insort(self._free, (start, end - start))


@dataclass(slots=True, frozen=True)
class Piece:
    """`data` uint8 [padded length] at `offset` of the region; `ticket` stands for it until it is given back."""

    ticket: int
    offset: int
    data: torch.Tensor


class LentPiece:
    """A piece that is given back when nothing refers to it any more, on whatever way that comes about."""

    def __init__(self, arena: PieceArena, piece: Piece) -> None:
        """Take `piece` over; `data` must not be used beyond this object."""
        self._arena = arena
        self._ticket = piece.ticket
        self.data = piece.data

    def __del__(self) -> None:
        self._arena.release((self._ticket,))


class PieceArena:
    """Pieces of memory that other processes can open. One thread reserves; any may release.

    Tickets are never used twice. Another arena's begin somewhere else, so that what was meant for an arena of a process
    that has died hits nothing in that of its successor.
    """

    def __init__(self, memory: SharedMemory) -> None:
        """Give pieces of `memory` away."""
        self._memory = memory
        self._allocator = PieceAllocator(memory.data.numel())
        self._offsets: dict[int, int] = {}  # by ticket
        self._released: deque[int] = deque()  # destructors may run anywhere, also within `reserve`: they only append
        self._next_ticket = secrets.randbits(30)

    @property
    def handle(self) -> bytes:
        """What opens the whole region in another process."""
        return self._memory.handle

    @property
    def num_held(self) -> int:
        """Pieces that have not been given back; any thread."""
        return len(set(self._offsets) - set(self._released.copy()))

    def reserve(self, num_bytes: int) -> Piece | None:
        """Return a piece for `num_bytes`, None when there is no room."""
        self._take_back()
        offset = self._allocator.take(num_bytes)
        if offset is None:
            return None
        self._next_ticket += 1
        self._offsets[self._next_ticket] = offset
        return Piece(self._next_ticket, offset, self._memory.data[offset : offset + padded(num_bytes)])

    def release(self, tickets: Iterable[int]) -> None:
        """Take pieces back; tickets that stand for nothing, or nothing any more, are left alone."""
        self._released.extend(tickets)

    def release_all(self) -> None:
        """Take all pieces back."""
        self.release(tuple(self._offsets))

    def _take_back(self) -> None:
        while self._released:
            offset = self._offsets.pop(self._released.popleft(), None)
            if offset is not None:
                self._allocator.give(offset)
