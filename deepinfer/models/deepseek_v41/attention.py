"""Latent attention: one vector per token is key and value of all heads; window rows and selected compressed rows."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.caches import Caches
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.indexer import Indexer, Published
from deepinfer.models.deepseek_v41.stacked import stack_rows
from deepinfer.models.deepseek_v41.step_rows import StepRows
from deepinfer.models.deepseek_v41.weight_types import AttentionWeights, QuantizedLinear


class Attention:
    """One layer's attention, with its compressor and indexer where the layer is a source."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: AttentionWeights,
        kernels: KernelSet,
        *,
        upstream_open_pair_keys: bool,
    ) -> None:
        def prepare(linear: QuantizedLinear) -> object:
            return kernels.quantized_linear.prepare(linear.weight, linear.scale)

        self.layer, self.kernels = layer, kernels
        self.num_heads, self.num_groups = config.num_attention_heads, config.o_groups
        self.epsilon, self.scale = config.rms_norm_eps, config.head_dim**-0.5
        self.source = config.kv_source_of(layer)
        self.down_weight, self.query_up = prepare(stack_rows(weights.wq_a, weights.wkv)), prepare(weights.wq_b)
        self.down_widths = [config.q_lora_rank, config.head_dim]
        self.out_weight = prepare(weights.wo_b)
        wo_a = weights.wo_a
        self.group_weight = kernels.grouped_linear.prepare(wo_a.weight, wo_a.scale, num_groups=config.o_groups)
        self.query_norm, self.latent_norm, self.sink = weights.q_norm, weights.kv_norm, weights.attn_sink
        self.compressor, self.indexer = None, None
        if weights.indexer is not None:
            if weights.compressor is not None:
                self.compressor = Compressor(config, layer, weights.compressor, weights.indexer, kernels)
            self.indexer = Indexer(
                config, layer, weights.indexer, kernels, upstream_open_pair_keys=upstream_open_pair_keys
            )

    def __call__(self, hidden: Tensor, rows: StepRows, caches: Caches, published: Published) -> Tensor:
        """Return [T, D] from the normalised input `hidden` [T, D]; writes this layer's caches."""
        kernels = self.kernels
        rotation = rows.window_rotation if self.source is None else rows.compressed_rotation
        query_latent, latent = kernels.quantized_linear(hidden, self.down_weight).split(self.down_widths, 1)
        query_latent = kernels.rms_norm(query_latent, self.query_norm, epsilon=self.epsilon)
        query = kernels.quantized_linear(query_latent, self.query_up).unflatten(1, (self.num_heads, -1))
        query = kernels.rotate(query, rotation.cosine, rotation.sine)
        latent = kernels.rms_norm(latent, self.latent_norm, epsilon=self.epsilon)
        records = caches.layout.window_record.pack(kernels.rotate(latent, rotation.cosine, rotation.sine))
        if self.compressor is not None:
            self.compressor(hidden, rows, caches)
        if self.indexer is not None:
            self.indexer(hidden, query_latent, rows, caches, published)
        out = self._attend(query, records, rows, caches, published)
        kernels.store_rows(caches.window[self.layer], rows.ring_targets, records[rows.ring_sources])
        out = kernels.rotate(out, rotation.cosine, rotation.sine, inverse=True)
        grouped = kernels.grouped_linear(out.reshape(len(out), self.num_groups, -1), self.group_weight)
        return kernels.quantized_linear(grouped, self.out_weight)

    def _attend(self, query: Tensor, records: Tensor, rows: StepRows, caches: Caches, published: Published) -> Tensor:
        compressed = self.source is not None
        return self.kernels.sparse_attention(
            query,
            ring=caches.window[self.layer],
            step_records=records,
            window_rows=rows.window_rows,
            window_record=caches.layout.window_record,
            main=None if self.source is None else caches.main[self.source],
            main_rows=published.main_rows if compressed else None,
            main_record=caches.layout.main_record if compressed else None,
            sink=self.sink,
            scale=self.scale,
        )
