"""Hyper-parameters: both spellings, what follows from them, and a named field for each fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoint_case import W16, config_json

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.config_file import parse_config, read_config
from deepinfer.models.deepseek_v41.released import released_config, released_config_json

RELEASED = released_config()


def test_flat_spelling_gives_the_same_config() -> None:
    nested = read_config(W16)
    flat = parse_config(json.loads((W16 / "inference_config.json").read_text()))
    assert flat.image_token_id is None  # not part of that file
    assert msgspec.structs.replace(flat, image_token_id=nested.image_token_id) == nested


def test_released_schedule() -> None:
    """The table of layers of the technical report."""
    sources = [RELEASED.kv_source_of(layer) for layer in range(40)]
    assert sources == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [layer for layer in range(40) if RELEASED.is_kv_source(layer)] == [2, 8, 14, 20]
    assert [layer for layer in range(40) if RELEASED.is_index_source(layer)] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [RELEASED.inside_candidates(layer) for layer in (2, 14, 20, 21, 24)] == [False] * 3 + [True] * 2
    assert [RELEASED.compress_ratio(layer) for layer in (0, 1, 2, 19, 20, 39)] == [0, 0, 2, 2, 1, 1]
    assert (RELEASED.num_layers, RELEASED.first_decoder_layer, RELEASED.num_draft_stages) == (40, 20, 3)
    assert RELEASED.num_engram_rows_per_token == 24


def test_no_decoder_without_a_ratio_1_source() -> None:
    raw = config_json()
    raw["text_config"] |= {
        "compress_ratios": [0, 0] + [2] * 10 + [0] * 3,
        "kv_source_layer_ids": [2, 5],
        "index_source_layer_ids": [2, 5],
        "candidate_source_layer_id": -1,
    }
    config = parse_config(raw)
    assert config.first_decoder_layer == config.num_layers
    assert not config.inside_candidates(11)


FAULTS: list[tuple[str, Any, str]] = [
    ("hidden_size", 130, "hidden_size"),
    ("hidden_size", "128", "hidden_size"),
    ("hidden_size", 0, "hidden_size"),
    ("num_attention_heads", 3, "o_groups"),
    ("qk_rope_head_dim", 15, "qk_rope_head_dim"),
    ("qk_rope_head_dim", 48, "qk_rope_head_dim"),
    ("compress_ratios", [0] * 14, "compress_ratios"),
    ("compress_ratios", [0, 0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 4, 0, 0, 0], "compress_ratios"),
    ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0], "compress_ratios"),
    ("compress_ratios", [0, 0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 1, 0], "compress_ratios"),
    ("kv_source_layer_ids", [5, 7], "kv_source_layer_ids"),
    ("kv_source_layer_ids", [1, 5, 7], "kv_source_layer_ids"),
    ("kv_source_layer_ids", [5, 2, 7], "kv_source_layer_ids"),
    ("index_source_layer_ids", [2, 7, 9, 11], "index_source_layer_ids"),
    ("index_source_layer_ids", [2, 5, 7, 12], "index_source_layer_ids"),
    ("candidate_source_layer_id", 9, "candidate_source_layer_id"),
    ("candidate_source_layer_id", 5, "candidate_source_layer_id"),
    ("candidate_topk_blocks", 2, "candidate_topk_blocks"),
    ("num_experts_per_tok", 25, "num_experts_per_tok"),
    ("n_shared_experts", 2, "n_shared_experts"),
    ("scoring_func", "sigmoid", "scoring_func"),
    ("norm_topk_prob", False, "norm_topk_prob"),
    ("engram_num_embeddings", [1362, 1551], "engram_num_embeddings"),
    ("engram_layer_ids", [1, 1], "engram_layer_ids"),
    ("engram_head_dim", 16, "engram_head_dim"),
    ("dspark_block_size", 0, "dspark_block_size"),
    ("dspark_target_layer_ids", [], "dspark_target_layer_ids"),
    ("dspark_num_experts_per_tok", 9, "dspark_num_experts_per_tok"),
    ("dspark_noise_token_id", 512, "dspark_noise_token_id"),
    ("num_key_value_heads", 2, "num_key_value_heads"),
    ("tie_word_embeddings", True, "tie_word_embeddings"),
    ("rope_scaling", None, "rope_scaling"),
    ("rope_scaling", {"rope_type": "linear"}, "rope_scaling.rope_type"),
]


@pytest.mark.parametrize(("field", "value", "path"), FAULTS)
def test_a_fault_names_its_field(field: str, value: Any, path: str) -> None:
    raw = config_json()
    raw["text_config"][field] = value
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("field", "value"), [("weight_block_size", [128, 128]), ("expert_dtype", "fp8"), ("scale_fmt", "float")]
)
def test_another_quantisation_is_refused(field: str, value: Any) -> None:
    raw = config_json()
    raw["quantization_config"][field] = value
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert caught.value.path == f"quantization_config.{field}"


def test_a_missing_field_is_named() -> None:
    raw = config_json()
    del raw["text_config"]["q_lora_rank"]
    with pytest.raises(ConfigError, match="q_lora_rank"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "does not exist"), ("{", "JSON"), ("[]", "list"), ("{}", "dim"), ("[" * 100_000, "JSON")],
)
def test_unreadable_file(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_config(tmp_path)


def test_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="deepseek_v3"):
        parse_config(released_config_json() | {"model_type": "deepseek_v3"})
