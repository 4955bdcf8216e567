"""Hyper-parameters of DeepSeek-V4.1 under one naming, and what follows from them; `config_file` reads them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from deepinfer.models.deepseek_v41.engram_constants import EngramConstants, build_engram_constants

_Count = Annotated[int, Meta(ge=1)]
_Natural = Annotated[int, Meta(ge=0)]
_Layers = tuple[_Natural, ...]

QUANT_BLOCK: Final = 32  # rows and columns of an FP8 scale tile, columns of an FP4 or engram scale


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Hyper-parameters of the text model and its draft stages; names of `config.json`'s `text_config`.

    `rope_*` of the YaRN scaling are lifted out of `rope_scaling`. A checked instance comes from `parse_config` or
    `read_config`; `msgspec.structs.replace` does not check again.
    """

    vocab_size: _Count
    hidden_size: _Count
    moe_intermediate_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    head_dim: _Count
    qk_rope_head_dim: _Count
    q_lora_rank: _Count
    o_lora_rank: _Count
    o_groups: _Count
    sliding_window: _Count
    swiglu_limit: Annotated[float, Meta(gt=0)]
    rms_norm_eps: Annotated[float, Meta(gt=0)]

    max_position_embeddings: _Count
    rope_theta: Annotated[float, Meta(gt=0)]
    compress_rope_theta: Annotated[float, Meta(gt=0)]
    rope_factor: Annotated[float, Meta(ge=1)]
    rope_beta_fast: Annotated[float, Meta(gt=0)]
    rope_beta_slow: Annotated[float, Meta(gt=0)]
    rope_original_max_position_embeddings: _Count

    compress_ratios: _Layers
    kv_source_layer_ids: _Layers
    index_source_layer_ids: _Layers
    index_n_heads: _Count
    index_head_dim: _Count
    index_topk: _Count
    candidate_source_layer_id: int
    candidate_topk_blocks: _Count
    candidate_block_size: _Count

    n_routed_experts: _Count
    num_experts_per_tok: _Count
    routed_scaling_factor: float
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True

    hc_mult: _Count
    hc_sinkhorn_iters: _Count
    hc_eps: Annotated[float, Meta(gt=0)]

    engram_layer_ids: _Layers
    engram_num_embeddings: tuple[_Count, ...]
    engram_max_ngram_size: Annotated[int, Meta(ge=2)]
    engram_vocab_size: Annotated[int, Meta(ge=2)]
    engram_n_heads: _Count
    engram_head_dim: _Count
    engram_pad_token_id: _Natural
    engram_compressed_vocab_size: _Count

    num_nextn_predict_layers: _Natural = 0
    dspark_block_size: _Natural = 0
    dspark_noise_token_id: _Natural = 0
    dspark_target_layer_ids: _Layers = ()
    dspark_markov_rank: _Natural = 0
    dspark_n_routed_experts: _Natural = 0
    dspark_num_experts_per_tok: _Natural = 0

    bos_token_id: _Natural = 0
    eos_token_id: _Natural = 1
    pad_token_id: _Natural = 2
    image_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        """Number of backbone layers."""
        return self.num_hidden_layers

    @property
    def num_draft_stages(self) -> int:
        """Number of DSpark stages; 0 when the checkpoint can't draft."""
        return self.num_nextn_predict_layers

    @property
    def first_decoder_layer(self) -> int:
        """First layer of the causal decoder: the ratio-1 KV source. `num_layers` when there is none.

        Layers from here on read the compressed KV of this layer only, so a prompt's earlier tokens can skip them.
        """
        last = self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else None
        return last if last is not None and self.compress_ratios[last] == 1 else self.num_layers

    @property
    def num_engram_rows_per_token(self) -> int:
        """Table rows that one token reads in one engram layer: n-gram lengths 2 .. max, times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def compress_ratio(self, layer: int) -> int:
        """Tokens per compressed entry that `layer` attends to: 1 or 2; 0 for a layer with its window only."""
        return self.compress_ratios[layer]

    def is_kv_source(self, layer: int) -> bool:
        """Whether `layer` owns a compressor, a compressed cache and index keys."""
        return layer in self.kv_source_layer_ids

    def is_index_source(self, layer: int) -> bool:
        """Whether `layer` runs the indexer and publishes a selection."""
        return layer in self.index_source_layer_ids

    def kv_source_of(self, layer: int) -> int | None:
        """Layer whose compressed cache `layer` reads; None for a window-only layer."""
        if self.compress_ratios[layer] == 0:
            return None
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def inside_candidates(self, layer: int) -> bool:
        """Whether an indexer of `layer` may select only inside the candidate pool of the candidate source layer."""
        return 0 <= self.candidate_source_layer_id < layer

    def engram_constants(self) -> tuple[EngramConstants, ...]:
        """Hash constants, one per engram layer in the order of `engram_layer_ids`. Computed on each call."""
        return build_engram_constants(
            self.engram_layer_ids,
            vocab_size=self.engram_vocab_size,
            num_heads=self.engram_n_heads,
            max_ngram_size=self.engram_max_ngram_size,
            num_classes=self.engram_compressed_vocab_size,
        )
