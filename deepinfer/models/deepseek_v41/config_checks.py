"""Checks between the fields of a `ModelConfig`; each failure is a `ConfigError` whose path is the field."""

from __future__ import annotations

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.engram_constants import build_engram_constants


def check_config(config: ModelConfig) -> None:
    """Raise `ConfigError` at the first field that contradicts another or that this implementation can't run."""
    _check_shapes(config)
    _check_schedule(config)
    _check_sources(config)
    _check_candidates(config)
    _check_experts(config)
    _check_engram(config)
    _check_draft(config)
    _check_tokens(config)


def _require(condition: bool, path: str, message: str) -> None:
    if not condition:
        raise ConfigError(message, path=path)


def _check_shapes(config: ModelConfig) -> None:
    for name in ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "index_head_dim"):
        value = getattr(config, name)
        _require(value % 32 == 0, name, f"{value} must be a multiple of 32, the width of a scale block")
    width = config.o_groups * config.o_lora_rank
    _require(width % 32 == 0, "o_lora_rank", f"o_groups * o_lora_rank = {width} must be a multiple of 32")
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, "o_groups", f"{groups} must divide num_attention_heads {heads}")
    rope = config.qk_rope_head_dim
    _require(rope % 2 == 0, "qk_rope_head_dim", f"{rope} must be even: channels are rotated in pairs")
    for name in ("head_dim", "index_head_dim"):
        _require(rope <= getattr(config, name), "qk_rope_head_dim", f"{rope} is above {name} {getattr(config, name)}")
    fast, slow = config.rope_beta_fast, config.rope_beta_slow
    _require(fast > slow, "rope_scaling.beta_fast", f"{fast} must be above beta_slow {slow}")


def _check_schedule(config: ModelConfig) -> None:
    ratios, wanted = config.compress_ratios, config.num_layers + config.num_draft_stages
    _require(
        len(ratios) == wanted,
        "compress_ratios",
        f"{len(ratios)} entries, but num_hidden_layers + num_nextn_predict_layers is {wanted}",
    )
    for layer, ratio in enumerate(ratios):
        _require(ratio in (0, 1, 2), "compress_ratios", f"layer {layer} has ratio {ratio}; supported are 0, 1 and 2")
    _require(not any(ratios[config.num_layers :]), "compress_ratios", "draft stages must have ratio 0")


def _check_sources(config: ModelConfig) -> None:
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_layer_ids(name, getattr(config, name), config.num_layers)
        for layer in getattr(config, name):
            _require(
                config.compress_ratio(layer) > 0, name, f"layer {layer} has compress ratio 0 and can't be a source"
            )
    missing = sorted(set(config.kv_source_layer_ids) - set(config.index_source_layer_ids))
    _require(not missing, "index_source_layer_ids", f"KV source layers {missing} must run an indexer too")
    for layer in range(config.num_layers):
        ratio = config.compress_ratio(layer)
        sources = [source for source in config.kv_source_layer_ids if source <= layer]
        if ratio > 0:
            _require(
                bool(sources), "kv_source_layer_ids", f"layer {layer} compresses by {ratio} but no source precedes it"
            )
            found = config.compress_ratio(sources[-1])
            _require(
                found == ratio, "compress_ratios", f"layer {layer} has {ratio}, its KV source {sources[-1]} has {found}"
            )


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer_id
    if source < 0:
        return
    name = "candidate_source_layer_id"
    _require(source in config.kv_source_layer_ids, name, f"layer {source} is not one of kv_source_layer_ids")
    later = [layer for layer in config.kv_source_layer_ids if layer > source]
    _require(not later, name, f"KV sources {later} come after layer {source}: its candidates are not theirs")
    pool = config.candidate_topk_blocks * config.candidate_block_size - (config.candidate_block_size - 1)
    _require(
        pool >= config.index_topk,
        "candidate_topk_blocks",
        f"the pool can be as small as {pool} entries, below index_topk {config.index_topk}",
    )


def _check_experts(config: ModelConfig) -> None:
    chosen, experts = config.num_experts_per_tok, config.n_routed_experts
    _require(chosen <= experts, "num_experts_per_tok", f"{chosen} is above n_routed_experts {experts}")
    _require(config.n_shared_experts == 1, "n_shared_experts", f"{config.n_shared_experts} is not supported, only 1 is")
    scoring = config.scoring_func
    _require(scoring == "sqrtsoftplus", "scoring_func", f"{scoring!r} is not supported, only 'sqrtsoftplus' is")
    _require(config.norm_topk_prob, "norm_topk_prob", "false is not supported, only true is")


def _check_engram(config: ModelConfig) -> None:
    _check_layer_ids("engram_layer_ids", config.engram_layer_ids, config.num_layers)
    if not config.engram_layer_ids:
        return
    width, columns = config.engram_head_dim, config.num_engram_rows_per_token * config.engram_head_dim
    _require(width % 32 == 0, "engram_head_dim", f"{width} must be a multiple of 32 ({columns} columns per token)")
    classes = config.engram_compressed_vocab_size
    _require(
        config.engram_pad_token_id < classes, "engram_pad_token_id", f"{config.engram_pad_token_id} is above {classes}"
    )
    constants = build_engram_constants(
        config.engram_layer_ids,
        vocab_size=config.engram_vocab_size,
        num_heads=config.engram_n_heads,
        max_ngram_size=config.engram_max_ngram_size,
        num_classes=classes,
    )
    wanted = tuple(layer.num_rows for layer in constants)
    _require(
        config.engram_num_embeddings == wanted,
        "engram_num_embeddings",
        f"{list(config.engram_num_embeddings)}, but the hash moduli of engram_vocab_size add up to {list(wanted)}",
    )


def _check_draft(config: ModelConfig) -> None:
    if config.num_draft_stages == 0:
        return
    name = "dspark_target_layer_ids"
    _check_layer_ids(name, config.dspark_target_layer_ids, config.num_layers)
    for field in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        _require(getattr(config, field) > 0, field, "must be at least 1 when there are draft stages")
    _require(bool(config.dspark_target_layer_ids), name, "must not be empty when there are draft stages")
    chosen, experts = config.dspark_num_experts_per_tok, config.dspark_n_routed_experts
    _require(chosen <= experts, "dspark_num_experts_per_tok", f"{chosen} is above dspark_n_routed_experts {experts}")


def _check_tokens(config: ModelConfig) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "dspark_noise_token_id"):
        token = getattr(config, name)
        _require(
            token is None or 0 <= token < config.vocab_size, name, f"{token} is outside the {config.vocab_size} tokens"
        )


def _check_layer_ids(name: str, layers: tuple[int, ...], num_layers: int) -> None:
    _require(list(layers) == sorted(set(layers)), name, f"{list(layers)} must ascend without repeats")
    _require(not layers or layers[-1] < num_layers, name, f"layer {max(layers, default=0)} is above {num_layers - 1}")
