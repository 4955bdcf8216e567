"""Compressed entries of a KV source layer: the latent of one or two tokens, its index key and its main record."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.caches import Caches
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.step_rows import StepRows
from deepinfer.models.deepseek_v41.weight_types import CompressorWeights, IndexerWeights


class Compressor:
    """Writes the entries that this step's rows close. An entry of two tokens appears when its second token runs."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: CompressorWeights, indexer: IndexerWeights, kernels: KernelSet
    ) -> None:
        assert indexer.wk is not None
        assert indexer.k_norm is not None
        self.layer, self.ratio, self.epsilon = layer, config.compress_ratio(layer), config.rms_norm_eps
        self.kernels = kernels
        stacked = weights.wkv if weights.wgate is None else torch.cat((weights.wkv, weights.wgate))
        self.weight = kernels.linear.prepare(stacked)
        self.norm = weights.norm
        self.key_weight = kernels.linear.prepare(indexer.wk)
        self.key_norm = indexer.k_norm

    def __call__(self, hidden: Tensor, rows: StepRows, caches: Caches) -> None:
        """Write index keys and main records from the normalised attention input `hidden` [T, D].

        All rows are computed and only those that close an entry are written.
        """
        entries, kernels = rows.entries[self.ratio], self.kernels
        latent = self._single(hidden) if self.ratio == 1 else self._pairs(hidden, rows, caches)
        latent = kernels.rms_norm(latent, self.norm, epsilon=self.epsilon)
        key = kernels.linear(latent, self.key_weight, out_dtype=kernels.numerics.dtype)
        key = kernels.rms_norm(key, self.key_norm, epsilon=self.epsilon)
        rotation, layout = entries.rotation, caches.layout
        key = kernels.rotate(key, rotation.cosine, rotation.sine)
        kernels.store_rows(caches.index[self.layer], entries.targets, layout.index_record.pack(key))
        main = kernels.rotate(latent, rotation.cosine, rotation.sine)
        kernels.store_rows(caches.main[self.layer], entries.targets, layout.main_record.pack(main))

    def _single(self, hidden: Tensor) -> Tensor:
        return self.kernels.linear(hidden, self.weight, out_dtype=self.kernels.numerics.dtype)

    def _pairs(self, hidden: Tensor, rows: StepRows, caches: Caches) -> Tensor:
        """Latents [T, d] of the pairs that end with each row; stores the first tokens of pairs for later steps."""
        kernels, ring = self.kernels, caches.open_pairs[self.layer]
        both = kernels.linear(hidden, self.weight, out_dtype=torch.float32)
        latent = kernels.pair_compress(both, ring, rows.pairs.first_rows)
        kernels.store_rows(ring.view(torch.uint8), rows.pairs.targets, both.view(torch.uint8))
        return latent
