"""The integer work around a forward pass: which rows a step has, what each of them reads, and what becomes of it.

T rows, B sequences, S slots; slot 0 is for padding rows. Every list has one entry a row, so no shape depends on what
the device holds. Results are the same bits everywhere; only angles are not integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True, frozen=True)
class RowLayout:
    """B sequences one after the other, then padding, which counts as one more sequence, in slot 0.

    `slots` [B + 1]; `starts` [B + 2]: first row of each sequence, then T. [T] by row: its `sequence`, B for padding;
    `offsets`, its place in it; `positions`, 0 for padding; `token_ids`; `row_slots`; `seeds`; `drafts`, the token at
    the next position where that has a row of this step, else -1. All int64. `is_padding` [T] bool.
    `own_rows` [B, width] int64: the rows of each sequence, its last one repeated; of one without any, some row.
    """

    slots: Tensor
    starts: Tensor
    sequence: Tensor
    offsets: Tensor
    positions: Tensor
    token_ids: Tensor
    row_slots: Tensor
    seeds: Tensor
    drafts: Tensor
    is_padding: Tensor
    own_rows: Tensor


@dataclass(slots=True, frozen=True)
class RingShapes:
    """Rings of keys: a row sees `window` positions; a slot's ring holds the last `ring` of them, all rings `ring_rows`.

    The rows of a pass stand behind the rings.
    """

    window: int
    ring: int
    ring_rows: int


@dataclass(slots=True, frozen=True)
class RowLists:
    """Int64, -1 where a row has no part. `window_rows` [T, window]: rows of the rings, or `ring_rows + t` for row t of
    this step, ascending by position, -1 behind the last; the rings as they were before the step. `ring_targets` [T]:
    the ring's row that keeps this row: the last `ring` positions of a sequence are kept.

    [2, T], entries of one token, then of two: `visible`, how many the row may see, its own closing one included;
    `targets`, the pool row of the entry that the row closes. `pair_first_rows` [T]: for the first row of
    a sequence here, where its pair lies in the ring of open pairs; -1 for others, whose pairs begin in this step.
    `pair_targets` [T]: that place, for the first tokens of pairs that are among the last ones of their sequence.
    `angles` float32 [3, T, R / 2]: of the window's rotation, of the compressed one, and of the latter at the first
    token of the row's pair: float32(position) * float32(frequency).
    """

    window_rows: Tensor
    ring_targets: Tensor
    visible: Tensor
    targets: Tensor
    pair_first_rows: Tensor
    pair_targets: Tensor
    angles: Tensor


class LayOutRows(Protocol):
    """Lay out `num_rows` rows: `lengths[b]` of them, at least 0, from `first_positions[b]` on for `slots[b]`, [B] each.

    `token_table` int32 [S, L], tokens by position; `seeds` [S]; both by slot. `width`: of `own_rows`. The lengths are
    not more than `num_rows` together.
    """

    def __call__(
        self,
        slots: Tensor,
        first_positions: Tensor,
        lengths: Tensor,
        *,
        token_table: Tensor,
        seeds: Tensor,
        num_rows: int,
        width: int,
    ) -> RowLayout: ...


class ListRows(Protocol):
    """Row lists of rows whose sequences are at consecutive positions; padding rows come last, in any last sequence.

    `positions`, `sequence` [T], `slots` [B], `starts` [B + 1], `is_padding` [T] as in `ForwardInputs`; `block_table`
    [B, n] int64. `seen_from` [B]: no window sees an earlier position of its sequence; None: all of it may be seen.
    `frequencies` float32 [2, R / 2]: the window's, the compressed. `tokens_per_block` of the block table; a slot keeps
    `open_pairs`.
    """

    def __call__(
        self,
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
    ) -> RowLists: ...


class TokenHistory(Protocol):
    """Mapped tokens int64 [T, length] at each row's position and the ones before; `pad_id` before the sequence.

    `positions`, `sequence` [T], `slots` [B]; `token_table` int32 [S, L]; `token_map` int64 [vocabulary].
    """

    def __call__(
        self,
        positions: Tensor,
        sequence: Tensor,
        slots: Tensor,
        *,
        token_table: Tensor,
        token_map: Tensor,
        length: int,
        pad_id: int,
    ) -> Tensor: ...


@dataclass(slots=True, frozen=True)
class AcceptedRows:
    """Of S sequences: `token_ids` [S, width] int64 of their rows, of which the first `counts` [S] int64 are committed:
    accepted drafts and one more, or 0 where the sequence had no rows. `failed` [S] bool: a committed row had failed.
    """

    token_ids: Tensor
    counts: Tensor
    failed: Tensor


@dataclass(slots=True, frozen=True)
class BlockRows:
    """Rows of B draft blocks of n: `token_ids` [B * n] int64, an anchor, then noise; `is_padding` [B * n] bool.

    `window_rows` [B * n, window + n] int64: the ring rows of the context, ascending, -1 where there is none, the same
    for every row of a block; then the block's own, `ring_rows + t` for row t of the pass. `angles` float32
    [B * n, R / 2]: float32(position) * float32(frequency).
    """

    token_ids: Tensor
    is_padding: Tensor
    window_rows: Tensor
    angles: Tensor


class AcceptRows(Protocol):
    """Accept the drafts of each sequence up to the first that is not the token chosen in its row.

    By row [R]: `token_ids` int64, `failed` bool, whose drafts are refused, `drafts` int64. `own_rows` [S, width] int64:
    the rows of each sequence; `num_drafts` [S] int64: -1 where it has none. Behind a sequence's last draft `drafts`
    holds what is no token.
    """

    def __call__(
        self, token_ids: Tensor, failed: Tensor, drafts: Tensor, own_rows: Tensor, num_drafts: Tensor
    ) -> AcceptedRows: ...


@dataclass(slots=True, frozen=True)
class SlotRows:
    """Of n slots, [n] int64: `positions` of their last tokens, their anchors, and `token_ids` there; 0 where there are
    none. `room`: how many drafts a step can use, at most those that are there; -1: the sequence has ended.

    A step commits one token more than it accepts drafts, and none beyond the limit. Slot 0 has always ended.
    """

    positions: Tensor
    token_ids: Tensor
    room: Tensor


class ReadSlots(Protocol):
    """Read what the slot table has of `slots` [n] int64. Columns as for `WriteTokens`, and `limits` [S] int64."""

    def __call__(
        self, token_table: Tensor, num_tokens: Tensor, num_drafts: Tensor, limits: Tensor, *, slots: Tensor
    ) -> SlotRows: ...


class WriteTokens(Protocol):
    """Write `token_ids[i]` behind the tokens of `slots[i]`, in place; `token_ids` [n, w] int64, `slots` [n] int64.

    `token_table` int32 [S, L]; `num_tokens`, `num_drafts` [S] int64. With `counts` [n] int64 that many more of the
    tokens count as the slot's own, no drafts are left, and a slot without a count is left alone. Without, all of them
    are drafts. Slot 0 stays as it is; the others differ where they are written.
    """

    def __call__(
        self,
        token_table: Tensor,
        num_tokens: Tensor,
        num_drafts: Tensor,
        *,
        slots: Tensor,
        token_ids: Tensor,
        counts: Tensor | None,
    ) -> None: ...


class DraftBlocks(Protocol):
    """Rows of draft blocks of `size` behind `anchor_ids` at `anchor_positions` in `slots`, [B] int64; 0 is padding.

    `starts` int64 [S]: positions below have no draft record. A window ends before the anchor for all rows: it does not
    slide. `frequencies` float32 [R / 2].
    """

    def __call__(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        slots: Tensor,
        *,
        starts: Tensor,
        frequencies: Tensor,
        noise_id: int,
        size: int,
        shapes: RingShapes,
    ) -> BlockRows: ...
