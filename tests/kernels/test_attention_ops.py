"""Sparse attention and index selection against plain formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.kernels.ops import CandidateRule, PagedRows, Selection
from deepinfer.kernels.registry import select_kernels

KERNELS = select_kernels("cpu", numerics="fp32", batch_invariant=True, overrides={})


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend(query: Tensor, window_rows: Tensor, main_rows: Tensor | None, sink: Tensor) -> Tensor:
    record = KERNELS.record_formats("window", 32)
    main = KERNELS.record_formats("main", 32)
    return KERNELS.sparse_attention(
        query,
        ring=record.pack(draw(20, 32, seed=1)),
        step_records=record.pack(draw(5, 32, seed=2)),
        window_rows=window_rows,
        window_record=record,
        main=None if main_rows is None else main.pack(draw(90, 32, seed=3)),
        main_rows=main_rows,
        main_record=None if main_rows is None else main,
        sink=sink,
        scale=0.2,
    )


def test_attention_is_a_softmax_with_a_sink_over_the_named_rows() -> None:
    query, sink = draw(2, 3, 32), torch.tensor([0.5, -1.0, 2.0])
    window_rows = torch.tensor([[0, 7, 22, -1], [-1, 24, 19, 3]])
    main_rows = torch.full((2, 80), -1)
    main_rows[0, ::2] = torch.arange(40)
    out = attend(query, window_rows, main_rows, sink)
    rows = torch.cat((draw(20, 32, seed=1), draw(5, 32, seed=2), draw(90, 32, seed=3)))
    for row, wanted in ((0, [0, 7, 22, *range(25, 65)]), (1, [24, 19, 3])):
        keys = rows[wanted].double()
        weights = torch.exp(query[row].double() @ keys.t() * 0.2)
        plain = weights @ keys / (weights.sum(1) + sink.double().exp()).unsqueeze(1)
        torch.testing.assert_close(out[row].double(), plain, rtol=1e-5, atol=1e-6)


def test_a_row_without_keys_gives_zeros() -> None:
    out = attend(draw(1, 3, 32), torch.full((1, 4), -1), None, torch.zeros(3))
    assert torch.equal(out, torch.zeros(1, 3, 32))


def select(
    lengths: list[int],
    visible: Tensor,
    *,
    num_selected: int,
    keys: Tensor,
    candidates: Tensor | None = None,
    rule: CandidateRule | None = None,
) -> tuple[Selection, Tensor]:
    """Sequence b holds the entries `keys[b]` in shuffled blocks of 4; returns the choice and the plain scores."""
    num_sequences, num_entries, width = keys.shape
    record = KERNELS.record_formats("index", width)
    num_blocks = num_sequences * num_entries // 4
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)).view(num_sequences, -1)
    pool = torch.zeros(num_blocks * 4, record.num_bytes, dtype=torch.uint8)
    pool.view(num_blocks, 4, -1)[table.flatten()] = record.pack(keys).view(num_blocks, 4, -1)
    row_sequence = torch.repeat_interleave(torch.tensor(lengths))
    query, weights = draw(len(visible), 3, width, seed=5), draw(len(visible), 3, seed=6)
    selection = KERNELS.index_select(
        query,
        weights,
        PagedRows(pool, record, table, 4),
        sequence_starts=torch.tensor([0, *lengths]).cumsum(0),
        row_sequence=row_sequence,
        visible=visible,
        num_selected=num_selected,
        candidates=candidates,
        rule=rule,
    )
    dots = torch.einsum("thd,tjd->thj", query, keys[row_sequence]).clamp_min(0)
    return selection, (dots * weights.unsqueeze(2)).sum(1)


def test_the_best_visible_entries_are_chosen_in_order() -> None:
    visible = torch.tensor([0, 3, 130, 131, 132, 133, 134, 135, 136, 137, 138, 64, 65])
    selection, scores = select([11, 2], visible, num_selected=5, keys=draw(2, 140, 32, seed=7))
    for row, count in enumerate(visible.tolist()):
        # rows whose weights are all negative have many zero scores
        best = sorted(sorted(range(count), key=lambda entry: (-scores[row, entry].item(), entry))[:5])
        assert selection.entries[row].tolist() == best + [-1] * (5 - len(best))


def test_equal_scores_go_to_the_lower_entry() -> None:
    keys = draw(1, 1, 32, seed=8).expand(1, 200, 32).contiguous()
    selection, _ = select([2], torch.tensor([200, 3]), num_selected=4, keys=keys)
    assert selection.entries.tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]


def test_candidates_are_the_best_blocks_and_the_newest() -> None:
    visible = torch.tensor([70, 9, 0])
    selection, scores = select(
        [3], visible, num_selected=4, keys=draw(1, 80, 32, seed=9), rule=CandidateRule(num_blocks=3, block_size=8)
    )
    assert selection.candidates is not None
    for row, count in enumerate(visible.tolist()):
        num_blocks = math.ceil(count / 8)
        best = [scores[row, 8 * block : min(8 * block + 8, count)].max().item() for block in range(num_blocks)]
        order = sorted(range(num_blocks), key=lambda block: (block != num_blocks - 1, -best[block], block))
        kept = sorted(order[:3])
        assert selection.candidates[row].tolist() == kept + [-1] * (3 - len(kept))


def test_candidates_limit_the_choice() -> None:
    blocks = torch.tensor([[1, 11, -1]])
    selection, _ = select(
        [1],
        torch.tensor([89]),
        num_selected=10,
        keys=draw(1, 100, 32, seed=10),
        candidates=blocks,
        rule=CandidateRule(num_blocks=3, block_size=8),
    )
    assert selection.entries.tolist() == [[*range(8, 16), 88, -1]]
    assert selection.candidates is blocks
