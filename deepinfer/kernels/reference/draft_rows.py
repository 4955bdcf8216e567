"""The reference of the integer work around drafts: what is accepted and committed, and the rows of draft blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.step_ops import AcceptedRows, BlockRows, RingShapes, SlotRows


def accept_rows(
    token_ids: Tensor, failed: Tensor, drafts: Tensor, own_rows: Tensor, num_drafts: Tensor
) -> AcceptedRows:
    """`step_ops.AcceptRows`."""
    accepted = (token_ids == drafts) & ~failed
    run = accepted[own_rows[:, :-1]].long().cumprod(1).sum(1)
    counts = torch.where(num_drafts < 0, 0, run + 1)
    committed = torch.arange(own_rows.shape[1], device=own_rows.device) < counts[:, None]
    return AcceptedRows(token_ids[own_rows], counts, (failed[own_rows] & committed).any(1))


def read_slots(
    token_table: Tensor, num_tokens: Tensor, num_drafts: Tensor, limits: Tensor, *, slots: Tensor
) -> SlotRows:
    """`step_ops.ReadSlots`."""
    counts = num_tokens[slots]
    positions = (counts - 1).clamp_min(0)
    room = torch.minimum(num_drafts[slots], limits[slots] - counts - 1)
    return SlotRows(positions, token_table[slots, positions].to(torch.int64), room)


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
    real = slots if counts is None else torch.where(counts > 0, slots, 0)
    width = token_ids.shape[1]
    columns = num_tokens[real, None] + torch.arange(width, device=slots.device)
    token_table[real[:, None], columns] = torch.where(real[:, None] > 0, token_ids, 0).to(torch.int32)
    if counts is None:
        num_drafts[real] = torch.where(real > 0, width, 0)
    else:
        num_tokens[real] += counts
        num_drafts.index_fill_(0, real, 0)


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
    num_blocks, device = len(slots), slots.device
    token_ids = anchor_ids.new_full((num_blocks, size), noise_id)
    token_ids[:, 0] = anchor_ids
    last = (anchor_positions - 1).unsqueeze(1)
    first = torch.maximum(last - shapes.window + 1, starts[slots].unsqueeze(1))
    wanted = first + torch.arange(shapes.window, device=device)
    context = torch.where(wanted <= last, slots.unsqueeze(1) * shapes.ring + wanted % shapes.ring, -1)
    own = shapes.ring_rows + torch.arange(num_blocks * size, device=device).view(-1, size)
    positions = (anchor_positions.unsqueeze(1) + torch.arange(size, device=device)).flatten()
    return BlockRows(
        token_ids=token_ids.flatten(),
        is_padding=(slots == 0).repeat_interleave(size, output_size=num_blocks * size),
        window_rows=torch.cat((context, own), 1).repeat_interleave(size, 0, output_size=num_blocks * size),
        angles=positions.float().unsqueeze(1) * frequencies,
    )


IMPLEMENTATIONS = (
    implementation("accept_rows", lambda _: accept_rows),
    implementation("read_slots", lambda _: read_slots),
    implementation("write_tokens", lambda _: write_tokens),
    implementation("draft_blocks", lambda _: draft_blocks),
)
