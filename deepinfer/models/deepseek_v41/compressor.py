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
        self.value_weight = kernels.linear.prepare(weights.wkv)
        self.gate_weight = None if weights.wgate is None else kernels.linear.prepare(weights.wgate)
        self.norm = weights.norm
        self.key_weight = kernels.linear.prepare(indexer.wk)
        self.key_norm = indexer.k_norm

    def __call__(self, hidden: Tensor, rows: StepRows, caches: Caches) -> None:
        """Write index keys and main records from the normalised attention input `hidden` [T, D]."""
        entries, kernels = rows.entries[self.ratio], self.kernels
        latent = self._single(hidden, entries.closing) if self.ratio == 1 else self._pairs(hidden, rows, caches)
        latent = kernels.rms_norm(latent, self.norm, epsilon=self.epsilon)
        key = kernels.linear(latent, self.key_weight, out_dtype=kernels.numerics.dtype)
        key = kernels.rms_norm(key, self.key_norm, epsilon=self.epsilon)
        rotation, layout = entries.rotation, caches.layout
        key = kernels.rotate(key, rotation.cosine, rotation.sine)
        kernels.store_rows(caches.index[self.layer], entries.targets, layout.index_record.pack(key))
        main = kernels.rotate(latent, rotation.cosine, rotation.sine)
        kernels.store_rows(caches.main[self.layer], entries.targets, layout.main_record.pack(main))

    def _single(self, hidden: Tensor, closing: Tensor) -> Tensor:
        return self.kernels.linear(hidden[closing], self.value_weight, out_dtype=self.kernels.numerics.dtype)

    def _pairs(self, hidden: Tensor, rows: StepRows, caches: Caches) -> Tensor:
        """Latents [n, d] of the closing rows; stores the first tokens of pairs for later steps."""
        assert self.gate_weight is not None
        linear, pairs, closing = self.kernels.linear, rows.pairs, rows.entries[2].closing
        value = linear(hidden, self.value_weight, out_dtype=torch.float32)
        gate = linear(hidden, self.gate_weight, out_dtype=torch.float32)
        both = torch.cat((value, gate), 1)
        ring = caches.open_pairs[self.layer]
        first = torch.where(pairs.in_step.unsqueeze(1), both[(closing - 1).clamp_min(0)], ring[pairs.stored])
        first_value, first_gate = first.chunk(2, 1)
        latent = self.kernels.pair_compress(first_value, first_gate, value[closing], gate[closing])
        ring.index_copy_(0, pairs.targets, both[pairs.sources])
        return latent
