"""The reference of the integer work around a forward pass, on cases that can be followed by hand."""

from __future__ import annotations

import torch

from deepinfer.kernels.registry import select_kernels
from deepinfer.kernels.step_ops import RingShapes, RowLayout, RowLists

KERNELS = select_kernels("cpu", numerics="reference", batch_invariant=False, overrides={})
TABLE = torch.arange(4 * 40, dtype=torch.int32).view(4, 40)
SEEDS = torch.tensor([0, 11, 22, 33])
SHAPES = RingShapes(window=3, ring=5, ring_rows=20)


def layout() -> RowLayout:
    """Slot 2: positions 6 and 7; slot 1: nothing; slot 3: position 0; two rows of padding."""
    return KERNELS.lay_out_rows(
        torch.tensor([2, 1, 3]),
        torch.tensor([6, 9, 0]),
        torch.tensor([2, 0, 1]),
        token_table=TABLE,
        seeds=SEEDS,
        num_rows=5,
        width=3,
    )


def lists(seen_from: list[int] | None = None) -> RowLists:
    rows, seen = layout(), None if seen_from is None else torch.tensor(seen_from)
    blocks = torch.tensor([[7, 5], [0, 0], [6, 0], [0, 0]])
    frequencies = torch.tensor([[1.0, 0.5], [2.0, 0.25]])
    return KERNELS.list_rows(
        rows.positions, rows.sequence, rows.slots, rows.starts, rows.is_padding, blocks, seen, frequencies, SHAPES,
        tokens_per_block=4, open_pairs=2,
    )  # fmt: skip


def test_rows_of_sequences_stand_one_after_the_other() -> None:
    rows = layout()
    assert rows.slots.tolist() == [2, 1, 3, 0]
    assert rows.starts.tolist() == [0, 2, 2, 3, 5]
    assert rows.sequence.tolist() == [0, 0, 2, 3, 3]
    assert rows.offsets.tolist() == [0, 1, 0, 0, 1]
    assert rows.positions.tolist() == [6, 7, 0, 0, 0]
    assert rows.token_ids.tolist() == [86, 87, 120, 0, 0]
    assert rows.row_slots.tolist() == [2, 2, 3, 0, 0]
    assert rows.seeds.tolist() == [22, 22, 33, 0, 0]
    assert rows.is_padding.tolist() == [False] * 3 + [True] * 2


def test_a_row_that_another_follows_has_a_draft_to_check() -> None:
    rows = layout()
    assert rows.drafts.tolist() == [87, -1, -1, -1, -1]
    assert rows.own_rows[[0, 2]].tolist() == [[0, 1, 1], [2, 2, 2]]


def test_windows_are_read_from_the_ring_until_this_step_began() -> None:
    found = lists()
    assert found.window_rows.tolist() == [[14, 10, 20], [10, 20, 21], [22, -1, -1], [-1] * 3, [-1] * 3]
    assert found.ring_targets.tolist() == [11, 12, 15, -1, -1]


def test_a_window_may_begin_later() -> None:
    assert lists([6, 0, 0, 0]).window_rows[:2].tolist() == [[20, -1, -1], [20, 21, -1]]


def test_entries_close_at_their_last_token() -> None:
    found = lists()
    assert found.visible.tolist() == [[7, 8, 1, 0, 0], [3, 4, 0, 0, 0]]
    assert found.targets.tolist() == [[22, 23, 24, -1, -1], [-1, 11, -1, -1, -1]]


def test_open_pairs_are_kept_and_found_again() -> None:
    found = lists()
    assert found.pair_targets.tolist() == [5, -1, 6, -1, -1]
    assert found.pair_first_rows.tolist() == [5, -1, 6, -1, -1]


def test_angles_are_products_of_position_and_frequency() -> None:
    window, entries, pairs = lists().angles
    assert window.tolist() == [[6, 3], [7, 3.5], [0, 0], [0, 0], [0, 0]]
    assert entries.tolist() == [[12, 1.5], [14, 1.75], [0, 0], [0, 0], [0, 0]]
    assert pairs[:2].tolist() == [[12, 1.5], [12, 1.5]]


def test_a_history_begins_with_the_sequence() -> None:
    rows = layout()
    found = KERNELS.token_history(
        rows.positions, rows.sequence, rows.slots, token_table=TABLE, token_map=torch.arange(200) * 10, length=3,
        pad_id=-1,
    )  # fmt: skip
    assert found[:3].tolist() == [[860, 850, 840], [870, 860, 850], [1200, -1, -1]]
