"""Pieces of a region: they never overlap, all that is given back is free again, and no ticket hits another's piece."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.platforms.platform import SharedMemory, load_platform
from deepinfer.runtime.piece_arena import ALIGNMENT, LentPiece, PieceAllocator, PieceArena, padded

SIZE = 40 * ALIGNMENT


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3000), st.integers(-50, -1)), max_size=80))
def test_pieces_never_overlap_and_first_fit_finds_any_room(steps: list[int]) -> None:
    """Against the simplest model of it: one flag for each unit of the region."""
    allocator = PieceAllocator(SIZE + 17)
    units = [False] * (SIZE // ALIGNMENT)
    held: list[tuple[int, int]] = []
    for step in steps:
        if step < 0:
            if held:
                first, count = held.pop(step % len(held))
                allocator.give(first * ALIGNMENT)
                units[first : first + count] = [False] * count
        else:
            count = padded(step) // ALIGNMENT
            fits = (first for first in range(len(units) - count + 1) if not any(units[first : first + count]))
            expected = next(fits, None)
            offset = allocator.take(step)
            assert offset == (None if expected is None else expected * ALIGNMENT)
            if expected is not None:
                units[expected : expected + count] = [True] * count
                held.append((expected, count))
        assert allocator.num_free_bytes == units.count(False) * ALIGNMENT
    for first, _ in held:
        allocator.give(first * ALIGNMENT)
    assert allocator.take(SIZE) == 0, "free neighbours have not become one"


def make_arena() -> PieceArena:
    return PieceArena(load_platform("cpu").share_memory(SIZE))


def test_a_ticket_serves_once_and_others_are_left_alone() -> None:
    arena = make_arena()
    first = arena.reserve(SIZE)
    assert first is not None
    assert arena.reserve(1) is None
    arena.release((first.ticket, first.ticket + 1))
    second = arena.reserve(100)
    assert second is not None
    assert (second.offset, len(second.data)) == (0, ALIGNMENT)
    arena.release((first.ticket,))
    assert arena.num_held == 1
    third = arena.reserve(ALIGNMENT)
    assert third is not None
    assert third.offset == ALIGNMENT
    arena.release_all()
    assert arena.num_held == 0
    assert len({first.ticket, second.ticket, third.ticket}) == 3


def test_tickets_of_two_arenas_differ() -> None:
    """With 30 random bits; a rank that has started again must not give back pieces for its forerunner's tickets."""
    tickets = {piece.ticket for piece in (make_arena().reserve(1) for _ in range(20)) if piece is not None}
    assert len(tickets) == 20
    assert max(tickets) < 2**31


def test_a_lent_piece_comes_back_when_nothing_refers_to_it() -> None:
    memory = SharedMemory(torch.zeros(SIZE, dtype=torch.uint8), b"")
    arena = PieceArena(memory)
    piece = arena.reserve(10)
    assert piece is not None
    piece.data.fill_(3)
    lent = LentPiece(arena, piece)
    users = [lent, (lent, "also in a tuple")]
    del lent, piece
    gc.collect()
    assert arena.num_held == 1
    users.clear()
    assert arena.num_held == 0
    assert memory.data[:ALIGNMENT].tolist() == [3] * ALIGNMENT
