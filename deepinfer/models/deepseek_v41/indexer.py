"""Selection of compressed entries: the query side of an index source, and what it publishes to later layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import CandidateRule, PagedRows, Selection
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.caches import Caches
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.step_rows import StepRows
from deepinfer.models.deepseek_v41.weight_types import IndexerWeights


@dataclass(slots=True)
class Published:
    """What the latest source layers of this forward pass left for the layers behind them.

    `main_rows` [T, k] int32: pool rows of the selected entries, -1 = none; `candidates`: the candidate source's blocks.
    """

    main_rows: Tensor | None = None
    candidates: Tensor | None = None


class Indexer:
    """Scores the entries of its layer's KV source and publishes the best.

    `upstream_open_pair_keys` reproduces a defect of the released code, for tests: on decode steps a ratio-2 source
    whose pair is still open scores against the keys of the last KV source, left from the step before.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: IndexerWeights,
        kernels: KernelSet,
        *,
        upstream_open_pair_keys: bool,
    ) -> None:
        source = config.kv_source_of(layer)
        assert source is not None
        self.source, self.ratio, self.kernels = source, config.compress_ratio(layer), kernels
        self.num_heads, self.num_selected = config.index_n_heads, config.index_topk
        self.factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.query_weight = kernels.quantized_linear.prepare(weights.wq_b.weight, weights.wq_b.scale)
        self.head_weight = kernels.linear.prepare(weights.weights_proj)
        self.inside_candidates = config.inside_candidates(layer)
        uses_blocks = self.inside_candidates or layer == config.candidate_source_layer_id
        self.rule = CandidateRule(config.candidate_topk_blocks, config.candidate_block_size) if uses_blocks else None
        self.last_source = config.kv_source_layer_ids[-1]
        self.upstream_open_pair_keys = upstream_open_pair_keys and self.ratio == 2

    def __call__(
        self, hidden: Tensor, query_latent: Tensor, rows: StepRows, caches: Caches, published: Published
    ) -> None:
        """Publish the selection of each row; `hidden` [T, D], `query_latent` [T, q rank]."""
        kernels, rotation = self.kernels, rows.compressed_rotation
        query = kernels.quantized_linear(query_latent, self.query_weight).unflatten(1, (self.num_heads, -1))
        query = kernels.rotate(query, rotation.cosine, rotation.sine)
        dtype = kernels.numerics.dtype
        weights = kernels.linear(hidden, self.head_weight, out_dtype=dtype) * self.factor
        chosen = self._select(query, weights, caches.index_rows(self.source, rows.block_table), rows, published)
        entries = chosen.entries
        if self.upstream_open_pair_keys:
            other = caches.index_rows(self.last_source, rows.block_table)
            stale = self._select(query, weights, other, rows, published).entries
            is_open = rows.is_decode & (rows.positions % 2 == 0)
            entries = torch.where(is_open.unsqueeze(1), stale, entries)
        published.main_rows = kernels.locate_entries(
            entries,
            rows.row_sequence,
            rows.block_table,
            entries_per_block=caches.entries_per_block(self.source),
        )
        if self.rule is not None:
            published.candidates = chosen.candidates

    def _select(
        self, query: Tensor, weights: Tensor, keys: PagedRows, rows: StepRows, published: Published
    ) -> Selection:
        return self.kernels.index_select(
            query,
            weights,
            keys,
            sequence_starts=rows.sequence_starts,
            row_sequence=rows.row_sequence,
            visible=rows.entries[self.ratio].visible,
            num_selected=self.num_selected,
            candidates=published.candidates if self.inside_candidates else None,
            rule=self.rule,
        )
