"""The integer work around drafts in Triton: one kernel each for what takes torch a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.step_ops import AcceptedRows, BlockRows, RingShapes, SlotRows

_ROWS = 32


@triton.jit
def _step_accept_kernel(
    tokens_ptr,
    failed_ptr,
    drafts_ptr,
    own_ptr,
    num_drafts_ptr,
    out_ptr,
    counts_ptr,
    out_failed_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sequence a program."""
    sequence = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    inside = places < WIDTH
    rows = tl.load(own_ptr + sequence * WIDTH + places, mask=inside, other=0)
    tokens = tl.load(tokens_ptr + rows, mask=inside, other=0)
    failed = tl.load(failed_ptr + rows, mask=inside, other=0).to(tl.int32)
    drafts = tl.load(drafts_ptr + rows, mask=inside, other=-1)
    is_refused = (tokens != drafts) | (failed != 0) | (places >= WIDTH - 1)
    run = tl.min(tl.where(is_refused, places, BLOCK), 0)
    count = tl.where(tl.load(num_drafts_ptr + sequence) < 0, 0, run + 1)
    has_failed = tl.max(tl.where(places < count, failed, 0), 0)
    tl.store(out_ptr + sequence * WIDTH + places, tokens, mask=inside)
    tl.store(counts_ptr + sequence, count.to(tl.int64))
    tl.store(out_failed_ptr + sequence, has_failed != 0)


@triton.jit(do_not_specialize=["num_rows"])
def _step_read_kernel(
    table_ptr,
    num_tokens_ptr,
    num_drafts_ptr,
    limits_ptr,
    slots_ptr,
    out_ptr,
    table_stride,
    num_rows,
    ROWS: tl.constexpr,
):
    """[3, n] at `out_ptr`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=inside, other=0)
    num_tokens = tl.load(num_tokens_ptr + slots, mask=inside, other=0)
    positions = tl.maximum(num_tokens - 1, 0)
    tokens = tl.load(table_ptr + slots * table_stride + positions, mask=inside, other=0)
    num_drafts = tl.load(num_drafts_ptr + slots, mask=inside, other=0)
    room = tl.minimum(num_drafts, tl.load(limits_ptr + slots, mask=inside, other=0) - num_tokens - 1)
    tl.store(out_ptr + rows, positions, mask=inside)
    tl.store(out_ptr + num_rows + rows, tokens.to(tl.int64), mask=inside)
    tl.store(out_ptr + 2 * num_rows + rows, room, mask=inside)


@triton.jit
def _step_write_kernel(
    table_ptr,
    num_tokens_ptr,
    num_drafts_ptr,
    slots_ptr,
    tokens_ptr,
    counts_ptr,
    table_stride,
    WITH_COUNTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slot a program."""
    place = tl.program_id(0)
    slot = tl.load(slots_ptr + place)
    count = slot
    if WITH_COUNTS:
        count = tl.load(counts_ptr + place)
    if (slot > 0) & (count > 0):
        columns = tl.arange(0, BLOCK)
        inside = columns < WIDTH
        num_tokens = tl.load(num_tokens_ptr + slot)
        tokens = tl.load(tokens_ptr + place * WIDTH + columns, mask=inside, other=0)
        tl.store(table_ptr + slot * table_stride + num_tokens + columns, tokens.to(tl.int32), mask=inside)
        if WITH_COUNTS:
            tl.store(num_tokens_ptr + slot, num_tokens + count)
        tl.store(num_drafts_ptr + slot, 0 if WITH_COUNTS else WIDTH)


@triton.jit
def _step_blocks_kernel(
    anchors_ptr,
    positions_ptr,
    slots_ptr,
    starts_ptr,
    frequencies_ptr,
    tokens_ptr,
    padding_ptr,
    window_ptr,
    angles_ptr,
    noise_id,
    ring_rows,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    sequence, place = row // SIZE, row % SIZE
    anchor, slot = tl.load(positions_ptr + sequence), tl.load(slots_ptr + sequence)
    tl.store(tokens_ptr + row, tl.where(place == 0, tl.load(anchors_ptr + sequence), noise_id))
    tl.store(padding_ptr + row, slot == 0)
    columns = tl.arange(0, BLOCK)
    wanted = tl.maximum(anchor - WINDOW, tl.load(starts_ptr + slot)) + columns
    numbers = tl.where(wanted < anchor, slot * RING + wanted % RING, -1)
    numbers = tl.where(columns < WINDOW, numbers, ring_rows + sequence * SIZE + columns - WINDOW)
    tl.store(window_ptr + row * (WINDOW + SIZE) + columns, numbers, mask=columns < WINDOW + SIZE)
    channels = tl.arange(0, HALF_BLOCK)
    frequencies = tl.load(frequencies_ptr + channels, mask=channels < HALF, other=0.0)
    angles = (anchor + place).to(tl.float32) * frequencies
    tl.store(angles_ptr + row * HALF + channels, angles, mask=channels < HALF)


def accept_rows(
    token_ids: Tensor, failed: Tensor, drafts: Tensor, own_rows: Tensor, num_drafts: Tensor
) -> AcceptedRows:
    """`step_ops.AcceptRows`."""
    num_sequences, width = own_rows.shape
    counts = num_drafts.new_empty(num_sequences)
    result = AcceptedRows(torch.empty_like(own_rows), counts, counts.new_empty(num_sequences, dtype=torch.bool))
    if num_sequences:
        _step_accept_kernel[(num_sequences,)](
            token_ids,
            failed,
            drafts,
            own_rows,
            num_drafts,
            result.token_ids,
            counts,
            result.failed,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
        )
    return result


def read_slots(
    token_table: Tensor, num_tokens: Tensor, num_drafts: Tensor, limits: Tensor, *, slots: Tensor
) -> SlotRows:
    """`step_ops.ReadSlots`."""
    out = slots.new_empty(3, len(slots))
    if len(slots):
        _step_read_kernel[(triton.cdiv(len(slots), _ROWS),)](
            token_table,
            num_tokens,
            num_drafts,
            limits,
            slots,
            out,
            token_table.stride(0),
            len(slots),
            ROWS=_ROWS,
            num_warps=1,
        )
    return SlotRows(*out.unbind())


def write_tokens(
    token_table: Tensor,
    num_tokens: Tensor,
    num_drafts: Tensor,
    *,
    slots: Tensor,
    token_ids: Tensor,
    counts: Tensor | None,
) -> None:
    """`step_ops.WriteTokens`."""
    num_slots, width = token_ids.shape
    if num_slots:
        _step_write_kernel[(num_slots,)](
            token_table,
            num_tokens,
            num_drafts,
            slots,
            token_ids.contiguous(),
            slots if counts is None else counts,
            token_table.stride(0),
            WITH_COUNTS=counts is not None,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
        )


def draft_blocks(
    anchor_ids: Tensor,
    anchor_positions: Tensor,
    slots: Tensor,
    *,
    starts: Tensor,
    frequencies: Tensor,
    noise_id: int,
    size: int,
    shapes: RingShapes,
) -> BlockRows:
    """`step_ops.DraftBlocks`."""
    num_rows, half = len(slots) * size, len(frequencies)
    width = shapes.window + size
    rows = BlockRows(
        token_ids=slots.new_empty(num_rows),
        is_padding=slots.new_empty(num_rows, dtype=torch.bool),
        window_rows=slots.new_empty(num_rows, width),
        angles=frequencies.new_empty(num_rows, half),
    )
    if num_rows:
        _step_blocks_kernel[(num_rows,)](
            anchor_ids,
            anchor_positions,
            slots,
            starts,
            frequencies,
            rows.token_ids,
            rows.is_padding,
            rows.window_rows,
            rows.angles,
            noise_id,
            shapes.ring_rows,
            SIZE=size,
            WINDOW=shapes.window,
            RING=shapes.ring,
            BLOCK=triton.next_power_of_2(width),
            HALF=half,
            HALF_BLOCK=triton.next_power_of_2(half),
            num_warps=1,
        )
    return rows


IMPLEMENTATIONS = (
    triton_kernel("accept_rows", lambda _: accept_rows),
    triton_kernel("read_slots", lambda _: read_slots),
    triton_kernel("write_tokens", lambda _: write_tokens),
    triton_kernel("draft_blocks", lambda _: draft_blocks),
)
