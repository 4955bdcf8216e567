"""The embedded tiny model: a small random checkpoint in the released format, with every mechanism in use.

Eight layers: 0 and 1 window only; 2 and 4 own ratio-2 caches (3 reuses); 5 owns the ratio-1 cache and the candidate
pool; 6 reuses it; 7 selects again inside the pool. N-gram memory before 1 and 4; three draft stages. Selection,
window (16) and pool are active within the first hundred tokens.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file
from tokenizers import Tokenizer

from deepinfer.errors import ConfigError
from deepinfer.models.checkpoint_files import SINGLE_FILE
from deepinfer.models.deepseek_v41.config_file import parse_config
from deepinfer.models.deepseek_v41.engram_constants import build_engram_constants
from deepinfer.models.deepseek_v41.tensor_table import tensor_table
from deepinfer.models.deepseek_v41.tiny_tokenizer import (
    END_TOKEN,
    SYSTEM_TOKEN,
    THINK_END_TOKEN,
    VOCAB_SIZE,
    tokenizer_config_json,
    tokenizer_json,
)
from deepinfer.models.deepseek_v41.tiny_weights import random_tensors
from deepinfer.models.deepseek_v41.token_map import IMAGE_TOKEN, TOKENIZER_FILE, build_token_map

REVISION: Final = 1  # of what `write_tiny` writes for a seed; part of the cached directory's name

_ENGRAM_LAYERS = (1, 4)
_ENGRAM_VOCAB_SIZE = 200
_ENGRAM_HEADS = 2
_MAX_NGRAM = 4


def write_tiny(directory: Path, seed: int = 0) -> None:
    """Write the tiny checkpoint into `directory`, which is made if missing and must be empty.

    Same seed, same bits: `config.json`, `tokenizer.json`, `tokenizer_config.json`, `model.safetensors`, about 5 MB.
    Raises `ConfigError` when the directory holds files or can't be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is not an empty directory; name a new one")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_files(directory, seed)
    except OSError as error:
        raise ConfigError(f"can't write the tiny checkpoint to {directory}: {error.strerror}") from None


def tiny_directory(cache_dir: Path) -> Path:
    """Return the directory of the tiny checkpoint (seed 0) below `cache_dir`, writing it on first use.

    It appears whole or not at all, so any number of processes may call this at once.
    """
    target = cache_dir / f"tiny-deepseek-v41-{REVISION}"
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_dir))
    except OSError as error:
        raise ConfigError(f"can't write the tiny checkpoint to {cache_dir}: {error.strerror}") from None
    try:
        write_tiny(draft)
        draft.chmod(0o755)
        draft.rename(target)
    except OSError as error:
        if not target.is_dir():  # else another process was first, with the same bits
            raise ConfigError(f"can't write the tiny checkpoint to {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _write_files(directory: Path, seed: int) -> None:
    tokenizer_file = tokenizer_json()
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_file))
    config_file = _config_json(tokenizer)
    config = parse_config(config_file)
    audible = {END_TOKEN, THINK_END_TOKEN}
    quiet = [token["id"] for token in tokenizer_file["added_tokens"] if token["content"] not in audible]
    tensors = dict(random_tensors(tensor_table(config), seed=seed, quiet_token_ids=quiet))
    _write_json(directory / "config.json", config_file)
    _write_json(directory / TOKENIZER_FILE, tokenizer_file)
    _write_json(directory / "tokenizer_config.json", tokenizer_config_json(config.max_position_embeddings))
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _config_json(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": tokenizer.token_to_id(END_TOKEN),
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_to_id(IMAGE_TOKEN),
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {
            "model_type": "deepseek_v41_text",
            **_backbone_json(),
            **_attention_json(),
            **_engram_json(num_classes=int(build_token_map(tokenizer).max()) + 1),
            "num_nextn_predict_layers": 3,
            "dspark_block_size": 5,
            "dspark_noise_token_id": tokenizer.token_to_id(SYSTEM_TOKEN),
            "dspark_target_layer_ids": [5, 6, 7],
            "dspark_markov_rank": 32,
            "dspark_n_routed_experts": 8,
            "dspark_num_experts_per_tok": 3,
        },
    }


def _backbone_json() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "rms_norm_eps": 1e-20,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 64,
        "hidden_act": "silu",
        "swiglu_limit": 2.0,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
    }


def _attention_json() -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "sliding_window": 16,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 2048,
        },
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
    }


def _engram_json(*, num_classes: int) -> dict[str, Any]:
    constants = build_engram_constants(
        _ENGRAM_LAYERS,
        vocab_size=_ENGRAM_VOCAB_SIZE,
        num_heads=_ENGRAM_HEADS,
        max_ngram_size=_MAX_NGRAM,
        num_classes=num_classes,
    )
    return {
        "engram_layer_ids": list(_ENGRAM_LAYERS),
        "engram_num_embeddings": [layer.num_rows for layer in constants],
        "engram_max_ngram_size": _MAX_NGRAM,
        "engram_vocab_size": _ENGRAM_VOCAB_SIZE,
        "engram_n_heads": _ENGRAM_HEADS,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": num_classes,
    }
