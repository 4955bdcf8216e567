"""The reference of the integer work around a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.step_ops import RingShapes, RowLayout, RowLists


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
    device = slots.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    slots, firsts = torch.cat((slots, zero)), torch.cat((first_positions, zero))
    ends = lengths.cumsum(0)
    rows = torch.arange(num_rows, device=device)
    sequence = torch.searchsorted(ends, rows, right=True)
    starts = torch.cat((zero, ends, zero + num_rows))
    offsets = rows - starts[sequence]
    is_padding = sequence == len(lengths)
    positions = torch.where(is_padding, 0, firsts[sequence] + offsets)
    row_slots = slots[sequence]
    is_followed = offsets + 1 < torch.cat((lengths, zero))[sequence]
    next_positions = torch.where(is_followed, positions + 1, 0)
    places = torch.minimum(torch.arange(width, device=device), (lengths - 1).clamp_min(0)[:, None])
    return RowLayout(
        slots=slots,
        starts=starts,
        sequence=sequence,
        offsets=offsets,
        positions=positions,
        token_ids=token_table[row_slots, positions].to(torch.int64),
        row_slots=row_slots,
        seeds=seeds[row_slots],
        drafts=torch.where(is_followed, token_table[row_slots, next_positions].to(torch.int64), -1),
        is_padding=is_padding,
        own_rows=(starts[:-2, None] + places).clamp_max(num_rows - 1),
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
    ring, real, row_slots = shapes.ring, ~is_padding, slots[sequence]
    first = positions - torch.arange(len(positions), device=positions.device) + starts[sequence]
    last = positions.new_zeros(len(slots)).scatter_reduce(0, sequence, positions, "amax")[sequence]
    earliest = torch.zeros_like(positions) if seen_from is None else seen_from[sequence]
    pairs, closes = positions // 2, positions % 2
    pool_rows = [
        _pool_rows(sequence, entries, block_table, tokens_per_block // size)
        for entries, size in ((positions, 1), (pairs, 2))
    ]
    pair_rows = row_slots * open_pairs + pairs % open_pairs
    is_kept = (closes == 0) & (positions > last - 2 * open_pairs)
    closing = torch.stack((real, real & (closes == 1)))
    places = torch.stack((positions, positions, pairs * 2)).float()
    return RowLists(
        window_rows=_window_rows(positions, first, earliest, row_slots, real, shapes),
        ring_targets=torch.where(real & (positions > last - ring), row_slots * ring + positions % ring, -1),
        visible=torch.where(real, torch.stack((positions + 1, pairs + closes)), 0),
        targets=torch.where(closing, torch.stack(pool_rows), -1),
        pair_first_rows=torch.where(real & (positions == first), pair_rows, -1),
        pair_targets=torch.where(real & is_kept, pair_rows, -1),
        angles=places.unsqueeze(2) * torch.stack((frequencies[0], frequencies[1], frequencies[1])).unsqueeze(1),
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
    back = positions.unsqueeze(1) - torch.arange(length, device=positions.device)
    tokens = token_table[slots[sequence].unsqueeze(1), back.clamp_min(0)].to(torch.int64)
    return torch.where(back < 0, pad_id, token_map[tokens])


def _window_rows(
    positions: Tensor, first: Tensor, earliest: Tensor, row_slots: Tensor, real: Tensor, shapes: RingShapes
) -> Tensor:
    ring, device = shapes.ring, positions.device
    wanted = torch.maximum(positions - shapes.window + 1, earliest).unsqueeze(1)
    wanted = wanted + torch.arange(shapes.window, device=device)
    numbers = torch.arange(len(positions), device=device)
    own = wanted + (shapes.ring_rows + numbers - positions).unsqueeze(1)
    stored = (row_slots * ring).unsqueeze(1) + wanted % ring
    newest = torch.where(real, positions, -1).unsqueeze(1)
    return torch.where(wanted <= newest, torch.where(wanted >= first.unsqueeze(1), own, stored), -1)


def _pool_rows(sequence: Tensor, entries: Tensor, block_table: Tensor, per_block: int) -> Tensor:
    """Pool rows [T] of one entry of each row's own sequence."""
    return block_table[sequence, entries // per_block] * per_block + entries % per_block


IMPLEMENTATIONS = (
    implementation("lay_out_rows", lambda _: lay_out_rows),
    implementation("list_rows", lambda _: list_rows),
    implementation("token_history", lambda _: token_history),
)
