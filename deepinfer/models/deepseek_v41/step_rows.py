"""Index lists of one step, computed once and read by every layer: which rows see, close and store what.

Every list has one entry per row, -1 where the row has no part in it, so no shape depends on what the device holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.kernels.step_ops import RingShapes
from deepinfer.models.deepseek_v41.caches import GLOBAL_GROUP, OPEN_PAIRS_PER_SLOT, Caches
from deepinfer.models.deepseek_v41.rope import Rotation
from deepinfer.models.model_spec import ForwardInputs


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
class StepRows:
    """T rows of B sequences. `window_rows` [T, W]: rows of a layer's ring, or `len(ring) + t` for row t of this step,
    ascending by position, -1 behind the last; the ring as it was before the step. `ring_targets` [T]: the ring's row
    that keeps this row, or -1. `entries` by ratio. The rotations are those of the rows: of layers without a compressed
    cache, and of the others.
    """

    row_sequence: Tensor
    sequence_starts: Tensor
    block_table: Tensor
    is_padding: Tensor
    positions: Tensor
    window_rows: Tensor
    ring_targets: Tensor
    window_rotation: Rotation
    compressed_rotation: Rotation
    entries: dict[int, EntryRows]
    pairs: PairRows

    @property
    def is_decode(self) -> Tensor:
        """[T] bool: the only row of its sequence and not its first token."""
        counts = self.sequence_starts.diff()[self.row_sequence]
        return (counts == 1) & (self.positions > 0) & ~self.is_padding


def build_step_rows(
    inputs: ForwardInputs,
    caches: Caches,
    *,
    window: int,
    frequencies: Tensor,
    window_starts: Tensor | None = None,
) -> StepRows:
    """Build the lists; rows of a sequence are at consecutive positions. `frequencies` as for `step_ops.ListRows`.

    `window_starts` [B]: no window sees an earlier position of its sequence; None: all of it may be seen.
    """
    lists = inputs.kernels.list_rows(
        inputs.positions,
        inputs.row_sequence,
        inputs.sequence_slots,
        inputs.sequence_starts,
        inputs.is_padding,
        inputs.block_tables[GLOBAL_GROUP],
        window_starts,
        frequencies,
        RingShapes(window, caches.layout.ring_length, len(caches.window[0])),
        tokens_per_block=caches.tokens_per_block,
        open_pairs=OPEN_PAIRS_PER_SLOT,
    )
    in_window, in_entries, in_pairs = map(Rotation, lists.angles.cos(), lists.angles.sin())
    return StepRows(
        row_sequence=inputs.row_sequence,
        sequence_starts=inputs.sequence_starts,
        block_table=inputs.block_tables[GLOBAL_GROUP],
        is_padding=inputs.is_padding,
        positions=inputs.positions,
        window_rows=lists.window_rows,
        ring_targets=lists.ring_targets,
        window_rotation=in_window,
        compressed_rotation=in_entries,
        entries={
            1: EntryRows(lists.visible[0], lists.targets[0], in_entries),
            2: EntryRows(lists.visible[1], lists.targets[1], in_pairs),
        },
        pairs=PairRows(lists.pair_first_rows, lists.pair_targets),
    )
