"""Reads `ModelConfig` from either of the two released files.

`config.json` nests the text model under `text_config`; the official `inference/config.json` is flat and uses other
names. Vision settings are not read: images are not supported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.config import QUANT_BLOCK, ModelConfig
from deepinfer.models.deepseek_v41.config_checks import check_config

# ModelConfig name -> name in the flat file, where they differ
_FLAT_NAMES: Final = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "num_experts_per_tok": "n_activated_experts",
    "routed_scaling_factor": "route_scale",
    "scoring_func": "score_func",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "rope_original_max_position_embeddings": "original_seq_len",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}

# ModelConfig name -> name inside `rope_scaling` of the nested file
_ROPE_NAMES: Final = {
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_max_position_embeddings": "original_max_position_embeddings",
}

# the only values that the implementation is written for
_FIXED_TEXT: Final[dict[str, object]] = {
    "hidden_act": "silu",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
}
_FIXED_QUANTIZATION: Final[dict[str, object]] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

_TOP_LEVEL_NAMES: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")


def read_config(directory: Path) -> ModelConfig:
    """Read and check `config.json` of a checkpoint directory; raises `ConfigError` naming the file and the field."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a checkpoint directory needs it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}, an object was expected")
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Return the checked config of a decoded `config.json` or flat `inference/config.json`.

    Raises `ConfigError` whose path is the field (in the nested spelling) for a missing field, a wrong type, a value
    that this implementation doesn't support or fields that contradict each other. Unknown fields are ignored: they
    belong to other programs.
    """
    values = _nested_values(raw) if "text_config" in raw else _flat_values(raw)
    values.setdefault("max_position_embeddings", _default_context_length(values))
    try:
        config = msgspec.convert(values, ModelConfig)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        raise ConfigError(message, path=place.rstrip("`") or "config.json") from None
    check_config(config)
    return config


def _nested_values(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("model_type") != "deepseek_v41":
        raise ConfigError(f"{raw.get('model_type')!r} is not supported; expected 'deepseek_v41'", path="model_type")
    text = _object(raw, "text_config")
    rope = _object(text, "rope_scaling")
    _expect(rope, "rope_type", "yarn", "rope_scaling.rope_type")
    for name, wanted in _FIXED_TEXT.items():
        _expect(text, name, wanted, name)
    quantization = _object(raw, "quantization_config")
    for name, wanted in _FIXED_QUANTIZATION.items():
        _expect(quantization, name, wanted, f"quantization_config.{name}")
    values = {name: text[name] for name in ModelConfig.__struct_fields__ if name in text}
    values |= {ours: rope[theirs] for ours, theirs in _ROPE_NAMES.items() if theirs in rope}
    values |= {name: raw[name] for name in _TOP_LEVEL_NAMES if name in raw}
    return values


def _flat_values(raw: dict[str, Any]) -> dict[str, Any]:
    if "dim" not in raw:
        raise ConfigError("neither `text_config` (config.json) nor `dim` (inference/config.json) is there")
    _expect(raw, "dtype", "fp8", "dtype")
    _expect(raw, "expert_dtype", "fp4", "expert_dtype")
    _expect(raw, "gate_temp", 1.0, "gate_temp")
    names = {name: _FLAT_NAMES.get(name, name) for name in ModelConfig.__struct_fields__}
    return {ours: raw[theirs] for ours, theirs in names.items() if theirs in raw}


def _default_context_length(values: dict[str, Any]) -> Any:
    """The flat file has no context length: YaRN's original length times its factor, as in the nested file."""
    original, factor = values.get("rope_original_max_position_embeddings"), values.get("rope_factor")
    if isinstance(original, int) and isinstance(factor, int | float):
        return int(original * factor)
    return None


def _object(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise ConfigError(f"an object is needed here, got {value!r}", path=name)
    return value


def _expect(raw: dict[str, Any], name: str, wanted: object, path: str) -> None:
    """Refuse another value than the one that the implementation is written for; absent is taken as that value."""
    if raw.get(name, wanted) != wanted:
        raise ConfigError(f"{raw[name]!r} is not supported, only {wanted!r} is", path=path)
