"""Rows written straight into the memory of other ranks, and the flags that tell them so, in Triton.

A rank's memory begins with one int64 flag for each rank. Ranks take turns: all push, then all meet. At a meeting a rank
raises its flag in every rank's memory to the number of the meeting (release) and waits until all of its own flags have
got that far (acquire), so that what was pushed before is seen by the kernels after it. Nothing here asks the host.

With `active` 0 a launch does nothing: no other rank hears of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD_BYTES = 4
_BLOCK = 1024


@triton.jit
def _copy_row(source_ptr, target_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, WORDS, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = words < WORDS
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["active", "num_rows"])
def _push_rows_kernel(
    rows_ptr,
    ids_ptr,
    weights_ptr,
    starts_ptr,
    peers_ptr,
    active,
    num_rows,
    RANK: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROWS_OFFSET: tl.constexpr,
    IDS_OFFSET: tl.constexpr,
    WEIGHTS_OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row `program_id(0)` for rank `program_id(1)`: local ids always, row and weights if it has one of the experts."""
    if active != 0:
        row, peer = tl.program_id(0), tl.program_id(1)
        place = (RANK * MAX_ROWS + row).to(tl.int64)
        base = tl.multiple_of(tl.load(peers_ptr + peer), 16)
        columns = tl.arange(0, COLUMN_BLOCK)
        inside = columns < COLUMNS
        copies = row.to(tl.int64) * COLUMNS + columns
        sent = inside & (copies < num_rows * COLUMNS)
        ids = tl.load(ids_ptr + copies, mask=sent, other=-1)
        first = tl.load(starts_ptr + peer)
        here = (ids >= first) & (ids < tl.load(starts_ptr + peer + 1))
        there = place * COLUMNS + columns
        local_ids = (base + IDS_OFFSET).to(tl.pointer_type(tl.int64))
        tl.store(local_ids + there, tl.where(here, ids - first, -1), mask=inside)
        if tl.sum(here.to(tl.int32), 0) > 0:
            weights = tl.load(weights_ptr + copies, mask=sent, other=0.0)
            tl.store((base + WEIGHTS_OFFSET).to(tl.pointer_type(tl.float32)) + there, weights, mask=inside)
            target = (base + ROWS_OFFSET).to(tl.pointer_type(tl.int32)) + place * WORDS
            _copy_row(rows_ptr + row.to(tl.int64) * WORDS, target, WORDS, BLOCK)


@triton.jit(do_not_specialize=["active"])
def _push_answers_kernel(
    values_ptr,
    places_ptr,
    ids_ptr,
    peers_ptr,
    active,
    MAX_ROWS: tl.constexpr,
    ANSWERS_OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The answer to column `program_id(1)` of arrived row `program_id(0)`, if it has one, to the rank it came from."""
    if active != 0:
        arrived, column = tl.program_id(0), tl.program_id(1)
        copy = arrived.to(tl.int64) * COLUMNS + column
        place = tl.load(places_ptr + copy).to(tl.int64)
        if (tl.load(ids_ptr + copy) >= 0) & (place >= 0):
            base = tl.multiple_of(tl.load(peers_ptr + arrived // MAX_ROWS), 16)
            target = (arrived % MAX_ROWS).to(tl.int64) * COLUMNS + column
            answers = (base + ANSWERS_OFFSET).to(tl.pointer_type(tl.int32))
            _copy_row(values_ptr + place * WORDS, answers + target * WORDS, WORDS, BLOCK)


@triton.jit(do_not_specialize=["active", "max_polls"])
def _meet_kernel(
    own_ptr,
    peers_ptr,
    state_ptr,
    alarm_ptr,
    active,
    max_polls,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """One warp. `state`: meetings so far, and whether one has failed: then no later one waits."""
    if active != 0:
        number = tl.load(state_ptr) + 1
        lanes = tl.arange(0, RANK_BLOCK)
        inside = lanes < NUM_RANKS
        peers = tl.load(peers_ptr + lanes, mask=inside, other=0)
        numbers = tl.zeros((RANK_BLOCK,), tl.int64) + number
        flags = peers.to(tl.pointer_type(tl.int64)) + RANK
        tl.atomic_xchg(flags, numbers, mask=inside, sem="release", scope="sys")
        zeros = tl.zeros((RANK_BLOCK,), tl.int64)
        polls = tl.where(tl.load(state_ptr + 1) != 0, max_polls, 0).to(tl.int64)
        waiting = tl.sum(inside.to(tl.int32), 0)
        while (waiting > 0) & (polls <= max_polls):
            seen = tl.atomic_add(own_ptr + lanes, zeros, mask=inside, sem="acquire", scope="sys")
            waiting = tl.sum((inside & (seen < number)).to(tl.int32), 0)
            polls += 1
        if waiting > 0:
            tl.store(state_ptr + 1, 1)
            tl.store(alarm_ptr, 1)
        tl.store(state_ptr, number)


def push_rows(
    rows: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    *,
    starts: Tensor,
    peers: Tensor,
    offsets: tuple[int, int, int],
    rank: int,
    max_rows: int,
    active: bool,
) -> None:
    """Write `rows` [T, D] (any dtype of whole words) with `expert_ids` [T, K] int64 and `weights` [T, K] float32.

    Row t goes to place `rank * max_rows + t` in the memory of each rank that holds one of its experts; rank p holds
    `starts[p] .. starts[p + 1] - 1` (int64 [R + 1]) and is told local ids, -1 for others and for the places behind T.
    `peers` int64 [R]: where each rank's memory begins; `offsets` in it: bytes to the rows, the ids and the weights.
    """
    num_rows, columns = expert_ids.shape
    _push_rows_kernel[(max_rows, len(peers))](
        words_of(rows),
        expert_ids.contiguous(),
        weights.contiguous(),
        starts,
        peers,
        int(active),
        num_rows,
        RANK=rank,
        MAX_ROWS=max_rows,
        ROWS_OFFSET=offsets[0],
        IDS_OFFSET=offsets[1],
        WEIGHTS_OFFSET=offsets[2],
        WORDS=rows.shape[1] * rows.element_size() // _WORD_BYTES,
        COLUMNS=columns,
        COLUMN_BLOCK=triton.next_power_of_2(columns),
        BLOCK=_BLOCK,
    )


def push_answers(
    values: Tensor, places: Tensor, expert_ids: Tensor, *, peers: Tensor, offset: int, max_rows: int, active: bool
) -> None:
    """Write row `places[i, k]` of `values` [P, D] to copy (t, k) of the rank that sent row i, t = i % max_rows.

    `places`, `expert_ids` [R * max_rows, K]; nothing is written where either is -1. `offset`: bytes to the answers.
    """
    _push_answers_kernel[tuple(expert_ids.shape)](
        words_of(values),
        places.contiguous(),
        expert_ids,
        peers,
        int(active),
        MAX_ROWS=max_rows,
        ANSWERS_OFFSET=offset,
        WORDS=values.shape[1] * values.element_size() // _WORD_BYTES,
        COLUMNS=expert_ids.shape[1],
        BLOCK=_BLOCK,
    )


def meet(
    flags: Tensor, *, peers: Tensor, state: Tensor, alarm: Tensor, rank: int, max_polls: int, active: bool
) -> None:
    """Wait until all ranks are here, whose pushes are then seen; after `max_polls` looks set `alarm` and go on.

    `flags` int64 [R]: the beginning of this rank's memory. `state` int64 [2] on the device, `alarm` int32 [1] on the
    host, where the device can write it.
    """
    _meet_kernel[(1,)](
        flags,
        peers,
        state,
        alarm,
        int(active),
        max_polls,
        RANK=rank,
        NUM_RANKS=len(peers),
        RANK_BLOCK=triton.next_power_of_2(len(peers)),
        num_warps=1,
    )


def words_of(rows: Tensor) -> Tensor:
    """The bytes of `rows` [N, D] as int32 [N * D * itemsize / 4]."""
    assert rows.shape[1] * rows.element_size() % _WORD_BYTES == 0, (rows.shape, rows.dtype)
    return rows.contiguous().flatten().view(torch.uint8).view(torch.int32)
