"""Index lists of one step, computed once and read by every layer: which rows see, close and store what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.caches import GLOBAL_GROUP, OPEN_PAIRS_PER_SLOT, Caches
from deepinfer.models.deepseek_v41.rope import Rotation, rotation_at
from deepinfer.models.model_spec import ForwardInputs


@dataclass(slots=True, frozen=True)
class EntryRows:
    """Compressed entries at one ratio. `visible` [T]: entries that each row may see, its own closing one included.

    `closing` [n]: rows that close an entry; `targets` [n]: pool rows of those entries; `rotation`: at the position of
    the first token of each closed entry. `entries_per_block`: for the block table.
    """

    visible: Tensor
    closing: Tensor
    targets: Tensor
    rotation: Rotation
    entries_per_block: int


@dataclass(slots=True, frozen=True)
class PairRows:
    """First tokens of pairs. For the closing rows of ratio 2: `in_step` [n] whether the first token is the row before
    in this step, else it lies in row `stored` [n] of the ring. `sources` [m] rows of this step go to ring `targets`.
    """

    in_step: Tensor
    stored: Tensor
    sources: Tensor
    targets: Tensor


@dataclass(slots=True, frozen=True)
class StepRows:
    """T rows of B sequences. `window_rows` [T, W]: rows of a layer's ring, or `len(ring) + t` for row t of this step,
    ascending by position, -1 behind the last; the ring as it was before the step. `ring_sources` -> `ring_targets`:
    rows of this step that the ring keeps. `is_decode` [T]: the only row of its sequence and not its first token.
    """

    row_sequence: Tensor
    sequence_starts: Tensor
    block_table: Tensor
    is_padding: Tensor
    is_decode: Tensor
    positions: Tensor
    window_rows: Tensor
    ring_sources: Tensor
    ring_targets: Tensor
    entries: dict[int, EntryRows]
    pairs: PairRows
    window_rotation: Rotation
    compressed_rotation: Rotation

    def pool_rows(self, entries: Tensor, entries_per_block: int) -> Tensor:
        """Pool rows of `entries` [T, k] of each row's own sequence; -1 stays -1."""
        known = entries.clamp_min(0)
        blocks = self.block_table[self.row_sequence.unsqueeze(1), known // entries_per_block]
        return torch.where(entries < 0, -1, blocks * entries_per_block + known % entries_per_block)


def build_step_rows(
    inputs: ForwardInputs,
    caches: Caches,
    *,
    window: int,
    window_frequencies: Tensor,
    compressed_frequencies: Tensor,
    window_starts: Tensor | None = None,
) -> StepRows:
    """Build the lists; rows of a sequence are at consecutive positions.

    `window_starts` [B]: no window sees an earlier position of its sequence; None: all of it may be seen.
    """
    positions, sequence, real = inputs.positions, inputs.row_sequence, ~inputs.is_padding
    slots = inputs.sequence_slots[sequence]
    extremes = positions.new_zeros(2, len(inputs.sequence_slots))
    first = extremes[0].scatter_reduce(0, sequence, positions, "amin", include_self=False)[sequence]
    last = extremes[1].scatter_reduce(0, sequence, positions, "amax", include_self=False)[sequence]
    starts = inputs.sequence_starts[sequence]
    seen_from = torch.zeros_like(positions) if window_starts is None else window_starts[sequence]
    ring = caches.layout.ring_length
    ring_sources = torch.nonzero(real & (positions > last - ring)).squeeze(1)
    table = inputs.block_tables[GLOBAL_GROUP]
    return StepRows(
        row_sequence=sequence,
        sequence_starts=inputs.sequence_starts,
        block_table=table,
        is_padding=inputs.is_padding,
        is_decode=(first == last) & (positions > 0) & real,
        positions=positions,
        window_rows=_window_rows(positions, seen_from, first, starts, slots, real, window, caches),
        ring_sources=ring_sources,
        ring_targets=slots[ring_sources] * ring + positions[ring_sources] % ring,
        entries={
            ratio: _entry_rows(
                positions, real, table[sequence], caches.tokens_per_block // ratio, ratio, compressed_frequencies
            )
            for ratio in sorted(set(caches.layout.ratios.values()))
        },
        pairs=_pair_rows(positions, first, last, slots, real),
        window_rotation=rotation_at(positions, window_frequencies),
        compressed_rotation=rotation_at(positions, compressed_frequencies),
    )


def _window_rows(
    positions: Tensor,
    seen_from: Tensor,
    first: Tensor,
    starts: Tensor,
    slots: Tensor,
    real: Tensor,
    window: int,
    caches: Caches,
) -> Tensor:
    ring = caches.layout.ring_length
    oldest = torch.maximum(positions - window + 1, seen_from)
    wanted = oldest.unsqueeze(1) + torch.arange(window, device=positions.device)
    own = caches.window[0].shape[0] + starts.unsqueeze(1) + wanted - first.unsqueeze(1)
    stored = slots.unsqueeze(1) * ring + wanted % ring
    rows = torch.where(wanted >= first.unsqueeze(1), own, stored)
    return torch.where((wanted <= positions.unsqueeze(1)) & real.unsqueeze(1), rows, -1)


def _entry_rows(
    positions: Tensor, real: Tensor, row_tables: Tensor, entries_per_block: int, ratio: int, frequencies: Tensor
) -> EntryRows:
    visible = torch.where(real, (positions + 1) // ratio, 0)
    closing = torch.nonzero(real & ((positions + 1) % ratio == 0)).squeeze(1)
    entries = visible[closing] - 1
    blocks = row_tables[closing].gather(1, (entries // entries_per_block).unsqueeze(1)).squeeze(1)
    return EntryRows(
        visible=visible,
        closing=closing,
        targets=blocks * entries_per_block + entries % entries_per_block,
        rotation=rotation_at(entries * ratio, frequencies),
        entries_per_block=entries_per_block,
    )


def _pair_rows(positions: Tensor, first: Tensor, last: Tensor, slots: Tensor, real: Tensor) -> PairRows:
    closing = torch.nonzero(real & (positions % 2 == 1)).squeeze(1)
    kept = positions > last - 2 * OPEN_PAIRS_PER_SLOT
    sources = torch.nonzero(real & (positions % 2 == 0) & kept).squeeze(1)

    def ring_row(rows: Tensor) -> Tensor:
        return slots[rows] * OPEN_PAIRS_PER_SLOT + positions[rows] // 2 % OPEN_PAIRS_PER_SLOT

    return PairRows(
        in_step=positions[closing] > first[closing],
        stored=ring_row(closing),
        sources=sources,
        targets=ring_row(sources),
    )
