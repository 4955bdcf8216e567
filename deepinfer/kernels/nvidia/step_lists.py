"""The integer work before a forward pass in Triton: one kernel each for what takes torch dozens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.step_ops import RingShapes, RowLayout, RowLists

_ROWS = 16


@triton.jit(do_not_specialize=["num_sequences", "num_rows"])
def _step_layout_kernel(
    slots_ptr,
    firsts_ptr,
    lengths_ptr,
    table_ptr,
    seeds_ptr,
    all_slots_ptr,
    starts_ptr,
    rows_ptr,
    padding_ptr,
    own_ptr,
    table_stride,
    num_sequences,
    num_rows,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows a program, [7, T] at `rows_ptr`; the first program also writes what there is of each sequence."""
    numbers = tl.arange(0, SEQUENCES)
    inside = numbers < num_sequences
    lengths = tl.load(lengths_ptr + numbers, mask=inside, other=0)
    ends = tl.cumsum(lengths, 0)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    before = (ends[None, :] <= rows[:, None]) & inside[None, :]
    sequence = tl.sum(before.to(tl.int64), 1)
    offsets = rows - tl.sum(tl.where(before, lengths[None, :], 0), 1)
    is_row = rows < num_rows
    is_real = is_row & (sequence < num_sequences)
    slots = tl.load(slots_ptr + sequence, mask=is_real, other=0)
    positions = tl.load(firsts_ptr + sequence, mask=is_real, other=0) + tl.where(is_real, offsets, 0)
    is_followed = offsets + 1 < tl.load(lengths_ptr + sequence, mask=is_real, other=0)
    tokens = table_ptr + slots * table_stride + positions
    tl.store(rows_ptr + rows, sequence, mask=is_row)
    tl.store(rows_ptr + num_rows + rows, offsets, mask=is_row)
    tl.store(rows_ptr + 2 * num_rows + rows, positions, mask=is_row)
    tl.store(rows_ptr + 3 * num_rows + rows, tl.load(tokens, mask=is_row, other=0).to(tl.int64), mask=is_row)
    tl.store(rows_ptr + 4 * num_rows + rows, slots, mask=is_row)
    tl.store(rows_ptr + 5 * num_rows + rows, tl.load(seeds_ptr + slots, mask=is_row, other=0), mask=is_row)
    drafts = tl.load(tokens + 1, mask=is_followed, other=-1).to(tl.int64)
    tl.store(rows_ptr + 6 * num_rows + rows, drafts, mask=is_row)
    tl.store(padding_ptr + rows, sequence == num_sequences, mask=is_row)
    if tl.program_id(0) == 0:
        tl.store(all_slots_ptr + numbers, tl.load(slots_ptr + numbers, mask=inside, other=0), mask=inside)
        tl.store(all_slots_ptr + num_sequences, 0)
        tl.store(starts_ptr, 0)
        tl.store(starts_ptr + 1 + numbers, ends, mask=inside)
        tl.store(starts_ptr + 1 + num_sequences, num_rows)
        places = tl.arange(0, WIDTH_BLOCK)[None, :]
        own = (ends - lengths)[:, None] + tl.minimum(places, tl.maximum(lengths - 1, 0)[:, None])
        own_mask = inside[:, None] & (places < WIDTH)
        tl.store(own_ptr + numbers[:, None] * WIDTH + places, tl.minimum(own, num_rows - 1), mask=own_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _step_lists_kernel(
    positions_ptr,
    sequence_ptr,
    slots_ptr,
    starts_ptr,
    padding_ptr,
    blocks_ptr,
    seen_ptr,
    frequencies_ptr,
    window_ptr,
    lists_ptr,
    angles_ptr,
    blocks_stride,
    ring_rows,
    num_rows,
    WITH_SEEN: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    RING: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """One row a program; [7, T] at `lists_ptr`."""
    row = tl.program_id(0).to(tl.int64)
    position, sequence = tl.load(positions_ptr + row), tl.load(sequence_ptr + row)
    slot, start = tl.load(slots_ptr + sequence), tl.load(starts_ptr + sequence)
    is_real = tl.load(padding_ptr + row) == 0
    first = position - row + start
    # the last real row of the sequence: padding may follow it in the same sequence
    last_row, end = row, tl.where(is_real, tl.load(starts_ptr + sequence + 1), row + 1)
    while end - last_row > 1:
        middle = (last_row + end) // 2
        is_padding = tl.load(padding_ptr + middle) != 0
        last_row, end = tl.where(is_padding, last_row, middle), tl.where(is_padding, middle, end)
    last = position + last_row - row

    columns = tl.arange(0, WINDOW_BLOCK)
    oldest = tl.maximum(position - WINDOW + 1, 0)
    if WITH_SEEN:
        oldest = tl.maximum(oldest, tl.load(seen_ptr + sequence))
    wanted = oldest + columns
    numbers = tl.where(wanted >= first, wanted + (ring_rows + row - position), slot * RING + wanted % RING)
    numbers = tl.where((wanted <= position) & is_real, numbers, -1)
    tl.store(window_ptr + row * WINDOW + columns, numbers, mask=columns < WINDOW)

    pair, closes = position // 2, position % 2
    blocks = blocks_ptr + sequence * blocks_stride
    target = tl.load(blocks + position // PER_BLOCK) * PER_BLOCK + position % PER_BLOCK
    HALF_PER_BLOCK: tl.constexpr = PER_BLOCK // 2
    pair_target = tl.load(blocks + pair // HALF_PER_BLOCK) * HALF_PER_BLOCK + pair % HALF_PER_BLOCK
    pair_row = slot * PAIRS + pair % PAIRS
    is_open = is_real & (closes == 0) & (position > last - 2 * PAIRS)
    own = lists_ptr + row
    tl.store(own, tl.where(is_real & (position > last - RING), slot * RING + position % RING, -1))
    tl.store(own + num_rows, tl.where(is_real, position + 1, 0))
    tl.store(own + 2 * num_rows, tl.where(is_real, pair + closes, 0))
    tl.store(own + 3 * num_rows, tl.where(is_real, target, -1))
    tl.store(own + 4 * num_rows, tl.where(is_real & (closes == 1), pair_target, -1))
    tl.store(own + 5 * num_rows, tl.where(is_real & (position == first), pair_row, -1))
    tl.store(own + 6 * num_rows, tl.where(is_open, pair_row, -1))

    channels = tl.arange(0, HALF_BLOCK)
    turning = channels < HALF
    slow = tl.load(frequencies_ptr + HALF + channels, mask=turning, other=0.0)
    angles = angles_ptr + row * HALF + channels
    place = position.to(tl.float32)
    tl.store(angles, place * tl.load(frequencies_ptr + channels, mask=turning, other=0.0), mask=turning)
    tl.store(angles + num_rows * HALF, place * slow, mask=turning)
    tl.store(angles + 2 * num_rows * HALF, (pair * 2).to(tl.float32) * slow, mask=turning)


@triton.jit(do_not_specialize=["num_rows"])
def _step_history_kernel(
    positions_ptr,
    sequence_ptr,
    slots_ptr,
    table_ptr,
    map_ptr,
    out_ptr,
    table_stride,
    pad_id,
    num_rows,
    LENGTH: tl.constexpr,
    LENGTH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    slots = tl.load(slots_ptr + tl.load(sequence_ptr + rows, mask=inside, other=0), mask=inside, other=0)
    columns = tl.arange(0, LENGTH_BLOCK)[None, :]
    back = tl.load(positions_ptr + rows, mask=inside, other=0)[:, None] - columns
    wanted = inside[:, None] & (columns < LENGTH)
    tokens = tl.load(table_ptr + slots[:, None] * table_stride + back, mask=wanted & (back >= 0), other=0)
    mapped = tl.load(map_ptr + tokens, mask=wanted & (back >= 0), other=0)
    tl.store(out_ptr + rows[:, None] * LENGTH + columns, tl.where(back < 0, pad_id, mapped), mask=wanted)


def lay_out_rows(
    slots: Tensor,
    first_positions: Tensor,
    lengths: Tensor,
    *,
    token_table: Tensor,
    seeds: Tensor,
    num_rows: int,
    width: int,
) -> RowLayout:
    """`step_ops.LayOutRows`."""
    num_sequences = len(slots)
    new = slots.new_empty
    all_slots, starts, own = new(num_sequences + 1), new(num_sequences + 2), new(num_sequences, width)
    rows, is_padding = new(7, num_rows), new(num_rows, dtype=torch.bool)
    _step_layout_kernel[(max(1, triton.cdiv(num_rows, _ROWS)),)](
        slots,
        first_positions,
        lengths,
        token_table,
        seeds,
        all_slots,
        starts,
        rows,
        is_padding,
        own,
        token_table.stride(0),
        num_sequences,
        num_rows,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        SEQUENCES=triton.next_power_of_2(max(1, num_sequences)),
        ROWS=_ROWS,
    )
    sequence, offsets, positions, token_ids, row_slots, row_seeds, drafts = rows.unbind()
    return RowLayout(
        slots=all_slots,
        starts=starts,
        sequence=sequence,
        offsets=offsets,
        positions=positions,
        token_ids=token_ids,
        row_slots=row_slots,
        seeds=row_seeds,
        drafts=drafts,
        is_padding=is_padding,
        own_rows=own,
    )


def list_rows(
    positions: Tensor,
    sequence: Tensor,
    slots: Tensor,
    starts: Tensor,
    is_padding: Tensor,
    block_table: Tensor,
    seen_from: Tensor | None,
    frequencies: Tensor,
    shapes: RingShapes,
    *,
    tokens_per_block: int,
    open_pairs: int,
) -> RowLists:
    """`step_ops.ListRows`."""
    num_rows, half = len(positions), frequencies.shape[1]
    window, lists = positions.new_empty(num_rows, shapes.window), positions.new_empty(7, num_rows)
    angles = frequencies.new_empty(3, num_rows, half)
    if num_rows:
        _step_lists_kernel[(num_rows,)](
            positions,
            sequence,
            slots,
            starts,
            is_padding,
            block_table,
            slots if seen_from is None else seen_from,
            frequencies,
            window,
            lists,
            angles,
            block_table.stride(0),
            shapes.ring_rows,
            num_rows,
            WITH_SEEN=seen_from is not None,
            WINDOW=shapes.window,
            WINDOW_BLOCK=triton.next_power_of_2(shapes.window),
            RING=shapes.ring,
            PER_BLOCK=tokens_per_block,
            PAIRS=open_pairs,
            HALF=half,
            HALF_BLOCK=triton.next_power_of_2(half),
            num_warps=1,
        )
    return RowLists(
        window_rows=window,
        ring_targets=lists[0],
        visible=lists[1:3],
        targets=lists[3:5],
        pair_first_rows=lists[5],
        pair_targets=lists[6],
        angles=angles,
    )


def token_history(
    positions: Tensor,
    sequence: Tensor,
    slots: Tensor,
    *,
    token_table: Tensor,
    token_map: Tensor,
    length: int,
    pad_id: int,
) -> Tensor:
    """`step_ops.TokenHistory`."""
    num_rows = len(positions)
    out = positions.new_empty(num_rows, length)
    if num_rows:
        _step_history_kernel[(triton.cdiv(num_rows, _ROWS),)](
            positions,
            sequence,
            slots,
            token_table,
            token_map,
            out,
            token_table.stride(0),
            pad_id,
            num_rows,
            LENGTH=length,
            LENGTH_BLOCK=triton.next_power_of_2(length),
            ROWS=_ROWS,
            num_warps=1,
        )
    return out


IMPLEMENTATIONS = (
    triton_kernel("lay_out_rows", lambda _: lay_out_rows),
    triton_kernel("list_rows", lambda _: list_rows),
    triton_kernel("token_history", lambda _: token_history),
)
