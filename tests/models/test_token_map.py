"""Compressed vocabulary: the golden map, the released map's hash, and refusal of another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checkpoint_case import W16, released_tokenizer_json
from tokenizers import Tokenizer

from deepinfer.errors import CheckpointError
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.token_map import (
    RELEASED_SHA256,
    build_token_map,
    check_token_map,
    load_tokenizer,
    read_token_map,
    token_map_sha256,
)


def test_golden_map() -> None:
    golden = json.loads((W16.parent / "engram.json").read_text())["token_map"]
    token_map = read_token_map(W16, read_config(W16))
    assert token_map.tolist() == golden
    assert token_map.dtype == np.int32


def test_released_map() -> None:
    token_map = build_token_map(Tokenizer.from_str(json.dumps(released_tokenizer_json())))
    assert int(token_map.max()) + 1 == 99092
    assert token_map[2] == 2
    assert token_map_sha256(token_map) == RELEASED_SHA256
    check_token_map(token_map, released_config())
    swapped = token_map.copy()
    swapped[[7, 8]] = swapped[[8, 7]]
    with pytest.raises(CheckpointError, match="not the released one"):
        check_token_map(swapped, released_config())


def test_tokens_that_differ_only_in_case_accents_or_space_share_a_class() -> None:
    tokenizer = load_tokenizer(W16)
    token_map = build_token_map(tokenizer)
    upper, lower = (tokenizer.token_to_id(text) for text in ("A", "a"))
    assert token_map[upper] == token_map[lower]
    space, tab = (tokenizer.token_to_id(text) for text in ("Ġ", "ĉ"))
    assert token_map[space] == token_map[tab]  # a lone space is kept, not stripped to nothing
    half, other_half = (tokenizer.token_to_id(text) for text in ("Ã", "Ħ"))
    assert token_map[half] != token_map[other_half]  # no valid text: the raw strings count


def test_another_tokenizer_is_refused() -> None:
    config = read_config(W16)
    token_map = build_token_map(load_tokenizer(W16))
    with pytest.raises(CheckpointError, match="380 classes"):
        check_token_map(token_map, msgspec.structs.replace(config, engram_compressed_vocab_size=381))
    with pytest.raises(CheckpointError, match="511 ids"):
        check_token_map(token_map[:511], config)
    with pytest.raises(CheckpointError, match="into class 1, not 2"):
        check_token_map(np.where(token_map == 2, 1, token_map).astype(np.int32), config)


@pytest.mark.parametrize("content", [None, "{}"])
def test_missing_or_broken_tokenizer_names_the_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
