"""Latent attention: one vector per token is key and value of all heads; window rows and selected compressed rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepinfer.kernels.ops import Activations, MixCoefficients
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.caches import Caches
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.indexer import Indexer, Published
from deepinfer.models.deepseek_v41.replay import Cut
from deepinfer.models.deepseek_v41.rope import Rotation
from deepinfer.models.deepseek_v41.stacked import stack_rows
from deepinfer.models.deepseek_v41.step_rows import StepRows
from deepinfer.models.deepseek_v41.weight_types import AttentionWeights, QuantizedLinear
from deepinfer.platforms.side_stream import HeldWork, SideStream


class Attention:
    """One layer's attention, with its compressor and indexer where the layer is a source."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: AttentionWeights,
        kernels: KernelSet,
        side: SideStream,
        *,
        upstream_open_pair_keys: bool,
    ) -> None:
        """`side` makes keys and selects among them while the queries are computed, and stores beside the output."""

        def prepare(linear: QuantizedLinear) -> object:
            return kernels.quantized_linear.prepare(linear.weight, linear.scale)

        self.layer, self.kernels, self.side = layer, kernels, side
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

    def __call__(
        self,
        hidden: Activations,
        mixing: HeldWork[MixCoefficients],
        rows: StepRows,
        caches: Caches,
        published: Published,
        cut: Cut | None = None,
    ) -> Tensor:
        """Return [T, D] from the normalised input `hidden` [T, D]; writes this layer's caches.

        `mixing` starts behind the attention kernel, whose last blocks leave room. With `cut` all rows write, and [K, D]
        of the kept ones is returned.
        """
        query_latent, latent = self.compress(hidden)
        asking, asking_latent = rows, query_latent
        if cut is not None:
            asking, asking_latent = cut.queries, query_latent[cut.kept]

        def make_keys() -> tuple[Tensor, Any]:
            records = self.records(latent, self._rotation(rows), caches)
            if self.compressor is not None:
                self.compressor(hidden.values, rows, caches)
            if self.indexer is not None:
                normed = self.kernels.rms_norm(asking_latent, self.query_norm, epsilon=self.epsilon)
                values = hidden.values if cut is None else hidden.values[cut.kept]
                self.indexer(values, normed, asking, caches, published)
            return records, self._locate(records, asking, caches, published)

        keys = self.side.start(make_keys)
        query = self.queries(asking_latent, self._rotation(asking))
        records, located = keys.wait()
        mixing.ready()
        mixed = self._attend(query, records, located, asking, caches, published)
        mixing.start()
        storing = self.side.start(
            lambda: self.kernels.store_rows(caches.window[self.layer], rows.ring_targets, records)
        )
        output = self.output(mixed, self._rotation(asking))
        storing.wait()
        return output

    def compress(self, hidden: Activations) -> tuple[Tensor, Tensor]:
        """Return the latents of the queries [T, q rank] and of the keys [T, d], not normalised; rows lie apart."""
        both = self.kernels.quantized_linear(hidden.values, self.down_weight, cast=hidden.cast)
        query_latent, latent = both.split(self.down_widths, 1)
        return query_latent, latent

    def records(self, latent: Tensor, rotation: Rotation, caches: Caches) -> Tensor:
        """Return the window records [T, bytes] of key latents. They hold until another layer makes its own."""
        return self.kernels.latent_records(
            latent,
            self.latent_norm,
            rotation.cosine,
            rotation.sine,
            epsilon=self.epsilon,
            record=caches.layout.window_record,
            out=caches.room_for_step(len(latent)),
        )

    def queries(self, query_latent: Tensor, rotation: Rotation) -> Tensor:
        """Return queries [T, H, d] from their latents [T, q rank]."""
        linear = self.kernels.quantized_linear
        query = linear.after_norm(query_latent, self.query_norm, self.query_up, epsilon=self.epsilon)
        return self.kernels.rotate(query.unflatten(1, (self.num_heads, -1)), rotation.cosine, rotation.sine)

    def output(self, mixed: Tensor, rotation: Rotation) -> Tensor:
        """Return [T, D] from the heads' mixed values [T, H, d]."""
        kernels = self.kernels
        mixed = kernels.rotate(mixed, rotation.cosine, rotation.sine, inverse=True)
        grouped = kernels.grouped_linear(mixed.flatten(1).unflatten(1, (self.num_groups, -1)), self.group_weight)
        return kernels.quantized_linear(grouped, self.out_weight)

    def _rotation(self, rows: StepRows) -> Rotation:
        return rows.window_rotation if self.source is None else rows.compressed_rotation

    def _locate(self, records: Tensor, rows: StepRows, caches: Caches, published: Published) -> Any:
        return self.kernels.sparse_attention.locate(
            ring=caches.window[self.layer],
            step_records=records,
            window_rows=rows.window_rows,
            window_record=caches.layout.window_record,
            main=None if self.source is None else caches.main[self.source],
            main_rows=None if self.source is None else published.main_rows,
        )

    def _attend(
        self, query: Tensor, records: Tensor, located: Any, rows: StepRows, caches: Caches, published: Published
    ) -> Tensor:
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
            located=located,
        )
