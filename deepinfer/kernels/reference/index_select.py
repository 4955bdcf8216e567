"""Scores of index keys and the choice of the best entries.

Rows are cut into tiles of one sequence each, keys into blocks of 64; only pairs that hold a visible entry are scored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import CandidateRule, Numerics, PagedRows, Selection
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.quantize import dequantize_fp4, quantize_fp4_index

_ROW_TILE = 8
_KEY_BLOCK = 64
_PAIRS_AT_ONCE = 64


@dataclass(slots=True, frozen=True)
class _RowTiles:
    """Tiles of rows: `rows` [M, R] row numbers (clamped), `sequence` [M], `num_blocks` [M] key blocks to score.

    `tile` and `place` [T]: where each row went.
    """

    rows: Tensor
    sequence: Tensor
    num_blocks: Tensor
    tile: Tensor
    place: Tensor


def choose_entries(scores: Tensor, num_selected: int) -> Tensor:
    """The entries [T, k] with the largest scores above -inf, ascending, -1 behind; ties go to the lower entry."""
    missing = num_selected - scores.shape[1]
    if missing > 0:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    ordered, entries = torch.sort(scores, dim=1, descending=True, stable=True)
    chosen, valid = entries[:, :num_selected], ordered[:, :num_selected] > -torch.inf
    absent = scores.shape[1]
    ascending = torch.where(valid, chosen, absent).sort(dim=1).values
    return torch.where(ascending == absent, -1, ascending)


def candidate_entries(candidates: Tensor, rule: CandidateRule, *, num_entries: int) -> Tensor:
    """bool [T, num_entries]: entries inside the kept blocks `candidates` [T, n]."""
    num_blocks = -(-num_entries // rule.block_size)
    mask = torch.zeros(len(candidates), num_blocks + 1, dtype=torch.bool, device=candidates.device)
    mask.scatter_(1, torch.where(candidates < 0, num_blocks, candidates), value=True)
    return mask[:, :-1].repeat_interleave(rule.block_size, 1)[:, :num_entries]


@dataclass(slots=True, frozen=True)
class IndexSelect:
    """`ops.IndexSelect`; `choose` (scores [T, C], number) -> entries is the tie rule."""

    numerics: Numerics
    choose: Callable[[Tensor, int], Tensor] = choose_entries

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        keys: PagedRows,
        *,
        sequence_starts: Tensor,
        row_sequence: Tensor,
        visible: Tensor,
        num_selected: int,
        candidates: Tensor | None,
        rule: CandidateRule | None,
    ) -> Selection:
        tiles = _cut_rows(sequence_starts, row_sequence, visible)
        scores = self.scores(query, weights, keys, tiles, visible)
        if candidates is not None:
            assert rule is not None, "candidates are blocks: their size is missing"
            inside = candidate_entries(candidates, rule, num_entries=scores.shape[1])
            return Selection(self.choose(scores.masked_fill(~inside, -torch.inf), num_selected), candidates)
        pool = None if rule is None else self._candidates(scores, visible, rule)
        return Selection(self.choose(scores, num_selected), pool)

    def scores(self, query: Tensor, weights: Tensor, keys: PagedRows, tiles: _RowTiles, visible: Tensor) -> Tensor:
        """float32 [T, C], C a multiple of the key block and the same for all rows; -inf where not visible."""
        values = query.float()
        if self.numerics.quantise_caches:
            values = dequantize_fp4(*quantize_fp4_index(values))
        width = int(tiles.num_blocks.max()) if len(tiles.num_blocks) else 0
        blocks = values.new_full((len(tiles.sequence), width, _ROW_TILE, _KEY_BLOCK), -torch.inf)
        pair_tile = torch.repeat_interleave(tiles.num_blocks)
        first_pair = tiles.num_blocks.cumsum(0) - tiles.num_blocks
        pair_block = torch.arange(len(pair_tile), device=query.device) - first_pair[pair_tile]
        for start in range(0, len(pair_tile), _PAIRS_AT_ONCE):
            tile, block = pair_tile[start : start + _PAIRS_AT_ONCE], pair_block[start : start + _PAIRS_AT_ONCE]
            key_values = _load_keys(keys, tiles.sequence[tile], block)
            rows = tiles.rows[tile]
            blocks[tile, block] = self._pair_scores(values[rows], weights[rows], key_values)
        scores = blocks.transpose(1, 2).flatten(2)[tiles.tile, tiles.place]
        entries = torch.arange(scores.shape[1], device=query.device)
        return scores.masked_fill(entries >= visible.unsqueeze(1), -torch.inf)

    def _candidates(self, scores: Tensor, visible: Tensor, rule: CandidateRule) -> Tensor:
        """The kept blocks [T, num_blocks], ascending, -1 behind. A block without a visible entry is never kept."""
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % rule.block_size), value=-torch.inf)
        best = padded.unflatten(1, (-1, rule.block_size)).amax(2)
        newest = (visible.unsqueeze(1) - 1) // rule.block_size
        numbers = torch.arange(best.shape[1], device=scores.device)
        best = best.masked_fill((numbers == newest) & (visible.unsqueeze(1) > 0), torch.inf)
        return self.choose(best, rule.num_blocks)

    def _pair_scores(self, query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """query [P, R, Hi, di], weights [P, R, Hi], keys [P, 64, di] -> float32 [P, R, 64]."""
        dtype = self.numerics.dtype
        dots = torch.bmm(query.flatten(1, 2), keys.transpose(1, 2)).to(dtype)
        dots = dots.unflatten(1, (_ROW_TILE, -1)).clamp_min(0)
        products = (dots.float() * weights.float().unsqueeze(-1)).to(dtype).float()
        total = products[:, :, 0]
        for head in range(1, products.shape[2]):
            total = total + products[:, :, head]
        return total.to(dtype).float()


def _cut_rows(sequence_starts: Tensor, row_sequence: Tensor, visible: Tensor) -> _RowTiles:
    device = visible.device
    lengths = sequence_starts.diff()
    num_tiles = -(-lengths // _ROW_TILE)
    sequence = torch.repeat_interleave(num_tiles)
    first_tile = num_tiles.cumsum(0) - num_tiles
    place = torch.arange(len(sequence), device=device) - first_tile[sequence]
    first_row = sequence_starts[sequence] + place * _ROW_TILE
    last_row = sequence_starts[sequence + 1] - 1
    rows = torch.minimum(first_row.unsqueeze(1) + torch.arange(_ROW_TILE, device=device), last_row.unsqueeze(1))
    offset = torch.arange(len(visible), device=device) - sequence_starts[row_sequence]
    return _RowTiles(
        rows=rows,
        sequence=sequence,
        num_blocks=-(-visible[rows].amax(1) // _KEY_BLOCK),
        tile=first_tile[row_sequence] + offset // _ROW_TILE,
        place=offset % _ROW_TILE,
    )


def _load_keys(keys: PagedRows, sequence: Tensor, block: Tensor) -> Tensor:
    """Unpack key block `block` [P] of `sequence` [P] -> float32 [P, 64, di]; the end of the table is repeated."""
    entries = block.unsqueeze(1) * _KEY_BLOCK + torch.arange(_KEY_BLOCK, device=block.device)
    entries = entries.clamp_max(keys.block_table.shape[1] * keys.entries_per_block - 1)
    blocks = keys.block_table[sequence.unsqueeze(1), entries // keys.entries_per_block]
    return keys.record.unpack(keys.pool[blocks * keys.entries_per_block + entries % keys.entries_per_block])


IMPLEMENTATIONS = (implementation("index_select", IndexSelect),)
