"""DSpark: three small stages over a block of an anchor and noise tokens, a Markov head and a confidence head.

The block attends to the draft rings and, without a causal mask, to itself. Always the whole trained block: drafts do
not depend on how many of them are wanted. Behind the last stage's keys only the wanted rows run. The equations are
those of the released reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.ops import Activations, MixCoefficients
from deepinfer.kernels.registry import KernelSet
from deepinfer.kernels.step_ops import BlockRows, RingShapes
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.caches import Caches
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.hyper_connection import HyperConnection, Residual
from deepinfer.models.deepseek_v41.moe import MixtureOfExperts
from deepinfer.models.deepseek_v41.rope import Rotation, window_frequencies
from deepinfer.models.deepseek_v41.weight_types import DraftWeights, LayerWeights
from deepinfer.models.model_spec import DraftBlock, DraftInputs
from deepinfer.platforms.side_stream import HeldWork, SideStreams


class DraftStage:
    """One stage: shaped like a window-only layer, but its rows see the context's keys and all keys of their block."""

    def __init__(
        self, config: ModelConfig, stage: int, weights: LayerWeights, kernels: KernelSet, sides: SideStreams
    ) -> None:
        self.stage, self.kernels = stage, kernels
        self.attention = Attention(
            config, config.num_layers + stage, weights.attention, kernels, sides.branch, upstream_open_pair_keys=False
        )
        self.experts = MixtureOfExperts(
            config, weights.moe, kernels, sides.branch, num_chosen=config.dspark_num_experts_per_tok
        )
        self.around_attention = HyperConnection(config, weights.hc_attn, weights.attn_norm, kernels, sides.mixing)
        self.around_experts = HyperConnection(config, weights.hc_ffn, weights.ffn_norm, kernels, sides.mixing)

    def __call__(
        self,
        residual: Residual,
        window_rows: Tensor,
        rotation: Rotation,
        is_padding: Tensor,
        inputs: DraftInputs,
        kept: Tensor | None,
    ) -> Residual:
        """Return the residual behind this stage; with `kept` [K] that of these rows, by number."""
        residual = self.around_attention(
            residual,
            lambda hidden, mixing: self._attend(hidden, mixing, window_rows, rotation, inputs.caches, kept),
            kept=kept,
        )
        is_padding = is_padding if kept is None else is_padding[kept]
        return self.around_experts(
            residual, lambda hidden, mixing: self.experts(hidden, mixing, is_padding, inputs.dispatcher)
        )

    def _attend(
        self,
        hidden: Activations,
        mixing: HeldWork[MixCoefficients],
        window_rows: Tensor,
        rotation: Rotation,
        caches: Caches,
        kept: Tensor | None,
    ) -> Tensor:
        query_latent, latent = self.attention.compress(hidden)
        records = self.attention.records(latent, rotation, caches)
        if kept is not None:
            query_latent, window_rows = query_latent[kept], window_rows[kept]
            rotation = Rotation(rotation.cosine[kept], rotation.sine[kept])
        query = self.attention.queries(query_latent, rotation)
        mixing.ready()
        mixed = self.kernels.sparse_attention(
            query,
            ring=caches.draft[self.stage],
            step_records=records,
            window_rows=window_rows,
            window_record=caches.layout.window_record,
            main=None,
            main_rows=None,
            main_record=None,
            sink=self.attention.sink,
            scale=self.attention.scale,
        )
        mixing.start()
        return self.attention.output(mixed, rotation)


class DraftNetwork:
    """See `model_spec.DraftNetwork`. `embedding` and `head` are the target's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DraftWeights,
        embedding: Tensor,
        head: Tensor,
        kernels: KernelSet,
        sides: SideStreams,
    ) -> None:
        self.block_size, self.num_experts = config.dspark_block_size, config.dspark_n_routed_experts
        self.config, self.kernels, self.embedding = config, kernels, embedding
        self.window, self.norm = config.sliding_window, weights.norm
        self.head = kernels.rough_linear.prepare(head)
        self.frequencies = window_frequencies(config, embedding.device)
        self.stages = [
            DraftStage(config, stage, stage_weights, kernels, sides)
            for stage, stage_weights in enumerate(weights.stages)
        ]
        self.markov_embedding, self.markov_head = weights.markov_embed, kernels.linear.prepare(weights.markov_head)
        self.confidence_weight = kernels.linear.prepare(weights.confidence)

    def run(self, inputs: DraftInputs) -> DraftBlock:
        """See `model_spec.DraftNetwork`."""
        num_sequences, size = len(inputs.slots), self.block_size
        rows = self._rows(inputs)
        opened = self.kernels.open_streams(self.embedding, rows.token_ids, num_streams=self.config.hc_mult)
        residual = Residual(*opened)
        rotation = Rotation(rows.angles.cos(), rows.angles.sin())
        wanted = None
        if inputs.num_drafts < size:
            numbers = torch.arange(num_sequences * size, device=inputs.slots.device).view(-1, size)
            wanted = numbers[:, : inputs.num_drafts].flatten()
        for stage in self.stages:
            kept = wanted if stage is self.stages[-1] else None
            residual = stage(residual, rows.window_rows, rotation, rows.is_padding, inputs, kept)
        residual = residual.settled(self.kernels)
        hidden = self.kernels.collapse_streams(residual.streams, residual.pre)
        normed = self.kernels.rms_norm(hidden, self.norm, epsilon=self.config.rms_norm_eps)
        logits = self.kernels.rough_linear(normed, self.head)
        shape = (num_sequences, inputs.num_drafts)
        return DraftBlock(logits.unflatten(0, shape), hidden.unflatten(0, shape))

    def markov_bias(self, token_ids: Tensor) -> Tensor:
        """See `model_spec.DraftNetwork`."""
        return self.kernels.linear(self.markov_embedding[token_ids], self.markov_head, out_dtype=torch.float32)

    def confidence(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """See `model_spec.DraftNetwork`."""
        joined = torch.cat((hidden.float(), self.markov_embedding[token_ids].float()), -1)
        return self.kernels.linear(joined, self.confidence_weight, out_dtype=torch.float32).squeeze(-1)

    def _rows(self, inputs: DraftInputs) -> BlockRows:
        caches = inputs.caches
        return self.kernels.draft_blocks(
            inputs.anchor_ids,
            inputs.anchor_positions,
            inputs.slots,
            starts=caches.draft_starts,
            frequencies=self.frequencies,
            noise_id=self.config.dspark_noise_token_id,
            size=self.block_size,
            shapes=RingShapes(self.window, caches.layout.ring_length, len(caches.draft[0])),
        )
