"""Index lists of one step, computed once and read by every layer: which rows see, close and store what.

Every list has one entry per row, -1 where the row has no part in it, so no shape depends on what the device holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.caches import GLOBAL_GROUP, OPEN_PAIRS_PER_SLOT, Caches
from deepinfer.models.deepseek_v41.rope import Rotation, rotation_at
from deepinfer.models.model_spec import ForwardInputs
from deepinfer.platforms.side_stream import SideStream, SideWork


@dataclass(slots=True, frozen=True)
class EntryRows:
    """Compressed entries at one ratio. `visible` [T]: entries that each row may see, its own closing one included.

    `targets` [T]: the pool row of the entry that the row closes, or -1; `rotation`: at the position of the first token
    of that entry.
    """

    visible: Tensor
    targets: Tensor
    rotation: Rotation


@dataclass(slots=True, frozen=True)
class PairRows:
    """First tokens of pairs, in a ring of open pairs.

    `first_rows` [T]: where the ring holds the first token of the pair that the row closes, or -1 when that is the row
    before in this step; `targets` [T]: the ring's row for this row, when it is such a token that must be kept, or -1.
    """

    first_rows: Tensor
    targets: Tensor


@dataclass(slots=True, frozen=True)
class CompressedRows:
    """What layers with a compressed cache need besides: `entries` by ratio, `pairs`, and the rotation of the rows."""

    entries: dict[int, EntryRows]
    pairs: PairRows
    rotation: Rotation


@dataclass(slots=True, frozen=True)
class StepRows:
    """T rows of B sequences. `window_rows` [T, W]: rows of a layer's ring, or `len(ring) + t` for row t of this step,
    ascending by position, -1 behind the last; the ring as it was before the step. `ring_targets` [T]: the ring's row
    that keeps this row, or -1. `first`, `last` [T]: positions of the first and last row of the row's sequence.
    The first layers run without `compressed`.
    """

    row_sequence: Tensor
    sequence_starts: Tensor
    block_table: Tensor
    is_padding: Tensor
    positions: Tensor
    first: Tensor
    last: Tensor
    window_rows: Tensor
    ring_targets: Tensor
    window_rotation: Rotation
    compressed: SideWork[CompressedRows]

    @property
    def entries(self) -> dict[int, EntryRows]:
        """See `CompressedRows`."""
        return self.compressed.wait().entries

    @property
    def pairs(self) -> PairRows:
        """See `CompressedRows`."""
        return self.compressed.wait().pairs

    @property
    def compressed_rotation(self) -> Rotation:
        """See `CompressedRows`."""
        return self.compressed.wait().rotation

    @property
    def is_decode(self) -> Tensor:
        """[T] bool: the only row of its sequence and not its first token."""
        return (self.first == self.last) & (self.positions > 0) & ~self.is_padding


def build_step_rows(
    inputs: ForwardInputs,
    caches: Caches,
    ahead: SideStream,
    *,
    window: int,
    window_frequencies: Tensor,
    compressed_frequencies: Tensor,
    window_starts: Tensor | None = None,
) -> StepRows:
    """Build the lists; rows of a sequence are at consecutive positions. Those of `compressed` are made `ahead`.

    `window_starts` [B]: no window sees an earlier position of its sequence; None: all of it may be seen.
    """
    positions, sequence, real = inputs.positions, inputs.row_sequence, ~inputs.is_padding
    slots = inputs.sequence_slots[sequence]
    numbers = torch.arange(len(positions), device=positions.device)
    first = positions - numbers + inputs.sequence_starts[sequence]
    highest = positions.new_zeros(len(inputs.sequence_slots)).scatter_reduce(0, sequence, positions, "amax")
    last = highest[sequence]
    seen_from = torch.zeros_like(positions) if window_starts is None else window_starts[sequence]
    ring = caches.layout.ring_length

    def make_compressed() -> CompressedRows:
        rotation = rotation_at(positions, compressed_frequencies)
        entries = {1: _every_row(inputs, real, caches, rotation)}
        if 2 in caches.layout.ratios.values():
            entries[2] = _every_other_row(inputs, real, caches, compressed_frequencies)
        return CompressedRows(entries, _pair_rows(positions, first, last, slots, real), rotation)

    return StepRows(
        row_sequence=sequence,
        sequence_starts=inputs.sequence_starts,
        block_table=inputs.block_tables[GLOBAL_GROUP],
        is_padding=inputs.is_padding,
        positions=positions,
        first=first,
        last=last,
        window_rows=_window_rows(positions, seen_from, first, numbers, slots, real, window, caches),
        ring_targets=torch.where(real & (positions > last - ring), slots * ring + positions % ring, -1),
        window_rotation=rotation_at(positions, window_frequencies),
        compressed=ahead.start(make_compressed),
    )


def _window_rows(
    positions: Tensor,
    seen_from: Tensor,
    first: Tensor,
    numbers: Tensor,
    slots: Tensor,
    real: Tensor,
    window: int,
    caches: Caches,
) -> Tensor:
    ring = caches.layout.ring_length
    oldest = torch.maximum(positions - window + 1, seen_from)
    wanted = oldest.unsqueeze(1) + torch.arange(window, device=positions.device)
    own = wanted + (caches.window[0].shape[0] + numbers - positions).unsqueeze(1)
    stored = (slots * ring).unsqueeze(1) + wanted % ring
    rows = torch.where(wanted >= first.unsqueeze(1), own, stored)
    newest = torch.where(real, positions, -1)
    return torch.where(wanted <= newest.unsqueeze(1), rows, -1)


def _every_row(inputs: ForwardInputs, real: Tensor, caches: Caches, rotation: Rotation) -> EntryRows:
    """Ratio 1: every row closes an entry of its own position."""
    rows = _pool_rows(inputs, inputs.positions, caches.tokens_per_block)
    return EntryRows(
        visible=torch.where(real, inputs.positions + 1, 0), targets=torch.where(real, rows, -1), rotation=rotation
    )


def _every_other_row(inputs: ForwardInputs, real: Tensor, caches: Caches, frequencies: Tensor) -> EntryRows:
    """Ratio 2: rows at odd positions close an entry."""
    entries = inputs.positions // 2
    closes = inputs.positions % 2
    rows = _pool_rows(inputs, entries, caches.tokens_per_block // 2)
    return EntryRows(
        visible=torch.where(real, entries + closes, 0),
        targets=torch.where(real & (closes == 1), rows, -1),
        rotation=rotation_at(entries * 2, frequencies),
    )


def _pool_rows(inputs: ForwardInputs, entries: Tensor, entries_per_block: int) -> Tensor:
    """Pool rows [T] of one entry of each row's own sequence."""
    blocks = inputs.block_tables[GLOBAL_GROUP][inputs.row_sequence, entries // entries_per_block]
    return blocks * entries_per_block + entries % entries_per_block


def _pair_rows(positions: Tensor, first: Tensor, last: Tensor, slots: Tensor, real: Tensor) -> PairRows:
    ring_rows = slots * OPEN_PAIRS_PER_SLOT + positions // 2 % OPEN_PAIRS_PER_SLOT
    kept = real & (positions % 2 == 0) & (positions > last - 2 * OPEN_PAIRS_PER_SLOT)
    return PairRows(
        first_rows=torch.where(real & (positions == first), ring_rows, -1), targets=torch.where(kept, ring_rows, -1)
    )
