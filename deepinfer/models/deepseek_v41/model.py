"""DeepSeek-V4.1 on one rank: embedding, layers, head."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.caches import Caches, allocate_caches, cache_layout
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.dspark import DraftNetwork
from deepinfer.models.deepseek_v41.dspark_rings import DraftRings, FeatureTap
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.engram_constants import EngramConstants
from deepinfer.models.deepseek_v41.hyper_connection import HyperConnection, Residual
from deepinfer.models.deepseek_v41.indexer import Published
from deepinfer.models.deepseek_v41.kv_exchange import export_kv, import_kv, kv_bytes
from deepinfer.models.deepseek_v41.moe import MixtureOfExperts
from deepinfer.models.deepseek_v41.replay import Cut, cut_rows, keep_rows, kept_numbers, replay_starts, upload
from deepinfer.models.deepseek_v41.rope import compressed_frequencies, window_frequencies
from deepinfer.models.deepseek_v41.step_rows import StepRows, build_step_rows
from deepinfer.models.deepseek_v41.weight_types import LayerWeights, Weights
from deepinfer.models.model_spec import ForwardInputs, ForwardOutput, KVPart
from deepinfer.platforms.side_stream import SideStreams, SideWork, open_side_streams


class Layer:
    """One backbone layer: memory, attention, experts."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: LayerWeights,
        constants: EngramConstants | None,
        kernels: KernelSet,
        *,
        sides: SideStreams,
        few_rows: bool,
        upstream_open_pair_keys: bool,
    ) -> None:
        self.kernels, self.engram = kernels, None
        if weights.engram is not None:
            assert constants is not None
            self.engram = Engram(config, weights.engram, constants, kernels)
        self.attention = Attention(
            config, layer, weights.attention, kernels, sides.branch, upstream_open_pair_keys=upstream_open_pair_keys
        )
        self.experts = MixtureOfExperts(
            config, weights.moe, kernels, sides.branch, num_chosen=config.num_experts_per_tok, few_rows=few_rows
        )
        self.around_attention = HyperConnection(config, weights.hc_attn, weights.attn_norm, kernels, sides.mixing)
        self.around_experts = HyperConnection(config, weights.hc_ffn, weights.ffn_norm, kernels, sides.mixing)

    def __call__(
        self,
        residual: Residual,
        history: Tensor,
        rows: StepRows,
        inputs: ForwardInputs,
        published: Published,
        memory: SideWork[Tensor] | None,
        cut: Cut | None,
    ) -> Residual:
        """Return the residual behind this layer; with `cut` that of its kept rows. `memory`: that of `history`."""
        if self.engram is not None:
            found = self.engram.memory(history, inputs.dispatcher) if memory is None else memory.wait()
            residual = residual.settled(self.kernels)
            residual = Residual(self.engram(residual.streams, found), residual.pre)
        residual = self.around_attention(
            residual,
            lambda hidden, mixing: self.attention(hidden, mixing, rows, inputs.caches, published, cut),
            kept=None if cut is None else cut.kept,
        )
        is_padding = rows.is_padding if cut is None else cut.behind.is_padding
        return self.around_experts(
            residual, lambda hidden, mixing: self.experts(hidden, mixing, is_padding, inputs.dispatcher)
        )


class DeepseekV41:
    """A loaded rank; see `model_spec.Model`. `token_map` int64 [vocabulary]: token -> compressed id for the memory.

    `keep_tokens`: how many tokens of a prompt run behind the last KV source (see `replay`); None: all of them, or no
    prompts at all. `upstream_open_pair_keys`: see `Indexer`; for tests only.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        token_map: Tensor,
        kernels: KernelSet,
        *,
        keep_tokens: int | None = None,
        upstream_open_pair_keys: bool = False,
    ) -> None:
        self.keep_tokens = keep_tokens
        self.config, self.kernels, self.token_map = config, kernels, token_map
        self.device = weights.embed.device
        self.embedding, self.norm = weights.embed, weights.norm
        self.head = kernels.linear.prepare(weights.head)
        rings, draft, sides = weights.draft_rings, weights.draft, open_side_streams(weights.embed.device)
        self.ahead = sides.ahead
        self.layout = cache_layout(config, kernels, with_drafts=rings is not None)
        self.draft_rings = None if rings is None else DraftRings(config, rings, kernels)
        self.draft_network = None
        if draft is not None:
            self.draft_network = DraftNetwork(config, draft, weights.embed, weights.head, kernels, sides)
        self.frequencies = torch.stack(
            (window_frequencies(config, self.device), compressed_frequencies(config, self.device))
        )
        constants = {constants.layer_id: constants for constants in config.engram_constants()}
        # where prompts are cut short; a replayed sequence needs the bits of other ranks, which recast experts
        has_few_rows = keep_tokens is not None and not kernels.batch_invariant
        self.layers = [
            Layer(
                config,
                layer,
                layer_weights,
                constants.get(layer),
                kernels,
                sides=sides,
                few_rows=has_few_rows and layer >= config.first_decoder_layer,
                upstream_open_pair_keys=upstream_open_pair_keys,
            )
            for layer, layer_weights in enumerate(weights.layers)
        ]

    @property
    def capturable(self) -> bool:
        """See `model_spec.Model`."""
        return all(layer.engram is None or layer.engram.capturable for layer in self.layers)

    def allocate_caches(
        self, *, num_blocks: dict[str, int], num_slots: int, tokens_per_block: int, max_step_rows: int = 0
    ) -> Caches:
        """See `model_spec.Model`; `num_blocks` needs the group "global" only."""
        return allocate_caches(
            self.layout,
            num_blocks=num_blocks,
            num_slots=num_slots,
            tokens_per_block=tokens_per_block,
            max_step_rows=max_step_rows,
            device=self.device,
        )

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """See `model_spec.Model`. Behind the first decoder layer only the kept rows of prompts run."""
        assert inputs.kernels is self.kernels, "the weights were prepared for another kernel set"
        residual = self.embed(inputs.token_ids)
        rows, history, logit_rows = self.step_rows(inputs), self.history(inputs), inputs.logit_rows
        cut, memories = self.cut(inputs, rows), self.memories_ahead(history, inputs)
        published = Published()
        tap = None if self.draft_rings is None else self.draft_rings.tap()
        for number, layer in enumerate(self.layers):
            if number in self.config.dspark_target_layer_ids:
                # with drafts or without: another kernel would do the same in another order, and round otherwise
                residual = residual.settled(self.kernels)
            if tap is not None:
                tap(number, residual.streams)
            here = cut if number == self.config.first_decoder_layer else None
            residual = layer(residual, history, rows, inputs, published, memories.get(number), here)
            if here is not None:
                rows, history, logit_rows = here.behind, history[here.kept], here.logit_rows
                if tap is not None:
                    tap.keep(here.kept)
        storing = self.ahead.start(lambda: self._store_features(tap, rows, inputs.caches))
        residual = residual.settled(self.kernels)
        streams, pre = residual.streams, residual.pre
        logits = self.logits(streams, pre) if logit_rows is None else self.logits(streams[logit_rows], pre[logit_rows])
        storing.wait()
        return ForwardOutput(logits)

    def _store_features(self, tap: FeatureTap | None, rows: StepRows, caches: Caches) -> None:
        if self.draft_rings is not None and tap is not None:
            self.draft_rings.store(tap.features(), rows, caches)

    def embed(self, token_ids: Tensor) -> Residual:
        """Return what enters the first layer."""
        return Residual(*self.kernels.open_streams(self.embedding, token_ids, num_streams=self.config.hc_mult))

    def memories_ahead(self, history: Tensor, inputs: ForwardInputs) -> dict[int, SideWork[Tensor]]:
        """Start to look up the memories of decode rows by layer, unless it takes an exchange: these have one order.

        Those of prompts would take much room: a layer looks them up when it runs.
        """
        if inputs.prompts is not None:
            return {}
        engrams = {number: layer.engram for number, layer in enumerate(self.layers) if layer.engram is not None}
        return {
            number: self.ahead.start(partial(engram.memory, history, inputs.dispatcher))
            for number, engram in engrams.items()
            if not engram.table.is_share
        }

    def cut(self, inputs: ForwardInputs, rows: StepRows) -> Cut | None:
        """Return which rows go on behind the first decoder layer; None: all of them."""
        if self.keep_tokens is None or inputs.prompts is None:
            return None
        starts = replay_starts(inputs.prompts, keep_tokens=self.keep_tokens)
        kept = upload(kept_numbers(inputs.prompts, starts, len(inputs.positions)), self.device)
        others = [0] * (len(inputs.sequence_slots) - len(starts))
        window_starts = upload(np.array([*starts, *others], np.int64), self.device)
        inputs = keep_rows(inputs, kept)
        assert inputs.logit_rows is not None, "the rows of prompts do not all give logits"
        return cut_rows(rows, self.step_rows(inputs, window_starts=window_starts), kept, inputs.logit_rows)

    def step_rows(self, inputs: ForwardInputs, *, window_starts: Tensor | None = None) -> StepRows:
        """Return the index lists of a step; see `build_step_rows`."""
        return build_step_rows(
            inputs,
            inputs.caches,
            window=self.config.sliding_window,
            frequencies=self.frequencies,
            window_starts=window_starts,
        )

    def history(self, inputs: ForwardInputs) -> Tensor:
        """Return the compressed ids that the memory layers hash."""
        return self.kernels.token_history(
            inputs.positions,
            inputs.row_sequence,
            inputs.sequence_slots,
            token_table=inputs.token_table,
            token_map=self.token_map,
            length=self.config.engram_max_ngram_size,
            pad_id=self.config.engram_pad_token_id,
        )

    def logits(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Return float32 [L, vocabulary] of the streams [L, M, D] behind the last layer."""
        hidden = self.kernels.collapse_streams(streams, pre)
        hidden = self.kernels.rms_norm(hidden, self.norm, epsilon=self.config.rms_norm_eps)
        return self.kernels.linear(hidden, self.head, out_dtype=torch.float32)

    def kv_bytes(self, caches: Caches, num_tokens: int) -> int:
        """See `model_spec.Model`."""
        return kv_bytes(caches, num_tokens)

    def export_kv(
        self,
        caches: Caches,
        *,
        slot: int,
        block_ids: dict[str, Tensor],
        num_tokens: int,
        into: Tensor | None = None,
    ) -> tuple[KVPart, ...]:
        """See `model_spec.Model`."""
        return export_kv(caches, slot=slot, block_ids=block_ids, num_tokens=num_tokens, into=into)

    def import_kv(
        self,
        caches: Caches,
        *,
        slot: int,
        block_ids: dict[str, Tensor],
        num_tokens: int,
        parts: tuple[KVPart, ...],
    ) -> None:
        """See `model_spec.Model`."""
        import_kv(caches, slot=slot, block_ids=block_ids, num_tokens=num_tokens, parts=parts)
