"""Selection of index entries in Triton: scores, then the best of them; see `index_codes`, `index_scores`, `select`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, triton_kernel
from deepinfer.kernels.nvidia.index_codes import index_record, quantise_query
from deepinfer.kernels.nvidia.index_scores import GROUP, Scores, score_all, score_kept
from deepinfer.kernels.nvidia.select import block_maxima, select_largest
from deepinfer.kernels.ops import CandidateRule, Numerics, PagedRows, Selection

_SCORE_BYTES = 1 << 30  # rows go through in pieces whose scores stay below this


@dataclass(slots=True, frozen=True)
class IndexSelect:
    """`ops.IndexSelect` in bf16 over FP8 index records.

    Bit for bit the reference's choice while the scales of a vector's groups of 32 are near each other; see
    `index_codes`. The time depends on what the block table can hold only through programs that end at once.
    """

    numerics: Numerics

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        keys: PagedRows,
        *,
        sequence_starts: Tensor,  # noqa: ARG002  the row's sequence says it all
        row_sequence: Tensor,
        visible: Tensor,
        num_selected: int,
        candidates: Tensor | None,
        rule: CandidateRule | None,
    ) -> Selection:
        assert keys.record.name == index_record(query.shape[2]).name, f"index keys held as {keys.record.name}"
        quantised = quantise_query(query, weights)
        if candidates is not None:
            assert rule is not None, "candidates are blocks: their size is missing"
            candidates = candidates.contiguous()
            scores = score_kept(quantised, keys, row_sequence, visible, candidates, rule)
            entries = select_largest(
                scores.values, num_selected, maxima=scores.maxima, blocks=candidates, block_size=rule.block_size
            )
            return Selection(entries, candidates)
        capacity = keys.block_table.shape[1] * keys.entries_per_block
        piece = max(4, _SCORE_BYTES // (2 * capacity) // 4 * 4)
        parts, kept = [], []
        for start in range(0, max(1, len(query)), piece):
            rows = slice(start, start + piece)
            scores = score_all(quantised.piece(rows), keys, row_sequence[rows], visible[rows])
            parts.append(select_largest(scores.values, num_selected, visible=visible[rows], maxima=scores.maxima))
            if rule is not None:
                kept.append(_keep_blocks(scores, visible[rows], rule))
        return Selection(_join(parts), _join(kept) if kept else None)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _keep_blocks(scores: Scores, visible: Tensor, rule: CandidateRule) -> Tensor:
    """The kept blocks [T, num_blocks]; the kept blocks ascend, so the order of places in them is that of entries."""
    values, unit = (scores.values, 1) if rule.block_size % GROUP else (scores.maxima, GROUP)
    best = block_maxima(values, visible, unit=unit, size=rule.block_size // unit, newest=True)
    return select_largest(best, rule.num_blocks, visible=visible, unit=rule.block_size)


IMPLEMENTATIONS = (triton_kernel("index_select", IndexSelect, dtypes=BF16, released_numerics_only=True),)
