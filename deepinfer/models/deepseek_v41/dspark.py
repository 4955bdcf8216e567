"""DSpark: three small stages over a block of an anchor and noise tokens, a Markov head and a confidence head.

The block attends to the draft rings and, without a causal mask, to itself. Always the whole trained block: drafts do
not depend on how many of them are wanted. Behind the last stage's keys only the wanted rows run. The equations are
those of the released reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.ops import Activations
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.caches import Caches
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.hyper_connection import HyperConnection, Residual, open_streams
from deepinfer.models.deepseek_v41.moe import MixtureOfExperts
from deepinfer.models.deepseek_v41.rope import Rotation, rotation_at, window_frequencies
from deepinfer.models.deepseek_v41.weight_types import DraftWeights, LayerWeights
from deepinfer.models.model_spec import DraftBlock, DraftInputs
from deepinfer.platforms.side_stream import SideStreams


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
            residual, lambda hidden: self._attend(hidden, window_rows, rotation, inputs.caches, kept), kept=kept
        )
        is_padding = is_padding if kept is None else is_padding[kept]
        return self.around_experts(residual, lambda hidden: self.experts(hidden, is_padding, inputs.dispatcher))

    def _attend(
        self, hidden: Activations, window_rows: Tensor, rotation: Rotation, caches: Caches, kept: Tensor | None
    ) -> Tensor:
        query_latent, latent = self.attention.compress(hidden)
        records = self.attention.records(latent, rotation, caches)
        if kept is not None:
            query_latent, window_rows = query_latent[kept], window_rows[kept]
            rotation = Rotation(rotation.cosine[kept], rotation.sine[kept])
        query = self.attention.queries(query_latent, rotation)
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
        steps = torch.arange(size, device=inputs.slots.device)
        residual = self._embed(inputs.anchor_ids)
        rotation = rotation_at((inputs.anchor_positions.unsqueeze(1) + steps).flatten(), self.frequencies)
        window_rows = self._window_rows(inputs).repeat_interleave(size, 0)
        is_padding = inputs.is_padding.repeat_interleave(size)
        numbers = torch.arange(num_sequences * size, device=steps.device).view(-1, size)
        wanted = numbers[:, : inputs.num_drafts].flatten()
        for stage in self.stages:
            kept = wanted if stage is self.stages[-1] else None
            residual = stage(residual, window_rows, rotation, is_padding, inputs, kept)
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

    def _embed(self, anchor_ids: Tensor) -> Residual:
        """The residual [B * block, ...] of the anchor and the noise tokens before the first stage."""
        token_ids = anchor_ids.new_full((len(anchor_ids), self.block_size), self.config.dspark_noise_token_id)
        token_ids[:, 0] = anchor_ids
        dtype = self.kernels.numerics.dtype
        return open_streams(self.embedding, token_ids.flatten(), self.config.hc_mult, dtype=dtype)

    def _window_rows(self, inputs: DraftInputs) -> Tensor:
        """[B, W + block]: the ring rows of the context, ascending, -1 where there is none; then the block's own rows.

        The window ends before the anchor for every row of the block: it does not slide.
        """
        caches, slots = inputs.caches, inputs.slots
        ring, total = caches.layout.ring_length, caches.draft[0].shape[0]
        last = inputs.anchor_positions - 1
        first = torch.maximum(last - self.window + 1, caches.draft_starts[slots])
        wanted = first.unsqueeze(1) + torch.arange(self.window, device=slots.device)
        context = torch.where(wanted <= last.unsqueeze(1), slots.unsqueeze(1) * ring + wanted % ring, -1)
        own = total + torch.arange(len(slots) * self.block_size, device=slots.device).view(-1, self.block_size)
        return torch.cat((context, own), 1)
