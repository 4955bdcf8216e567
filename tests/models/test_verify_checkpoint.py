"""Verification lists every deviation, from headers alone: also of the released model's 96,085 tensors."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from checkpoint_case import (
    W16,
    config_json,
    copy_w16,
    read_header,
    released_tokenizer_json,
    split_w16,
    write_file,
    write_index,
    write_sparse,
)

from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.released import released_config, released_config_json
from deepinfer.models.deepseek_v41.tensor_table import Part, TensorSpec, tensor_table
from deepinfer.models.deepseek_v41.verify import verify_checkpoint


def test_golden_checkpoint_has_no_deviation() -> None:
    assert verify_checkpoint(W16) == []


def test_every_deviation_is_listed_once(tmp_path: Path) -> None:
    path = copy_w16(tmp_path) / "model.safetensors"
    header, data = read_header(path)
    del header["layers.0.attn.wkv.scale"]
    header["layers.0.ape"] = header.pop("layers.3.hc_attn_base")
    header["head.weight"]["dtype"] = "F16"
    header["layers.1.attn.wo_a.weight"]["shape"] = [32, 128]
    header["norm.weight"]["shape"] = [129]
    write_file(path, header, data)
    raw = config_json()
    raw["text_config"]["engram_compressed_vocab_size"] = 381
    (tmp_path / "config.json").write_text(json.dumps(raw))
    names = [deviation.name for deviation in verify_checkpoint(tmp_path)]
    assert len(names) == len(set(names))
    assert set(names) == {
        "layers.0.attn.wkv.scale",
        "layers.0.ape",
        "layers.3.hc_attn_base",
        "head.weight",
        "layers.1.attn.wo_a.weight",
        "norm.weight",
        "tokenizer.json",
    }


def test_a_broken_config_ends_it(tmp_path: Path) -> None:
    raw = config_json()
    raw["text_config"]["head_dim"] = 33
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (deviation,) = verify_checkpoint(tmp_path)
    assert (deviation.name, "head_dim" in deviation.message) == ("config.json", True)


def test_the_tokenizer_of_the_model_before_is_told_apart(tmp_path: Path) -> None:
    """V4 names the image token otherwise; the token map is the same."""
    path = copy_w16(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text().replace("<｜deepseek_image｜>", "<｜image2｜>"))
    (deviation,) = verify_checkpoint(tmp_path)
    assert deviation.name == "tokenizer.json"
    assert "image_token_id 510 is '<｜image2｜>'" in deviation.message


def test_missing_files_are_not_listed_tensor_by_tensor(tmp_path: Path) -> None:
    copy_w16(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "tokenizer.json").unlink()
    assert [deviation.name for deviation in verify_checkpoint(tmp_path)] == [
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def _image_tensors() -> list[TensorSpec]:
    """As many names as the release has, of the same size in sum."""
    names = [f"vision.block.{number}" for number in range(259)] + [f"aligner.{number}" for number in range(4)]
    names += ["image_start", "image_end", "image_newline"]
    size = 970_536_960 // 2 // len(names)
    rest = 970_536_960 // 2 - size * (len(names) - 1)
    return [
        TensorSpec(name, "BF16", (rest if number == 0 else size,), Part.EMBEDDING) for number, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released checkpoint as 48 sparse files: true headers and sizes, no data."""
    directory = tmp_path_factory.mktemp("released")
    shards: dict[int, list[TensorSpec]] = defaultdict(list)
    for spec in [*tensor_table(released_config()).values(), *_image_tensors()]:
        is_engram = ".engram." in spec.name
        number = 46 + (spec.layer == 14) if is_engram else (spec.layer if spec.layer is not None else 45)
        shards[min(number, 47)].append(spec)
    weight_map, total_size = {}, 0
    for number, specs in shards.items():
        file_name = f"model-{number + 1:05}-of-00048.safetensors"
        total_size += write_sparse(directory / file_name, specs)
        weight_map |= dict.fromkeys((spec.name for spec in specs), file_name)
    assert len(weight_map) == 96085
    assert total_size == 510_286_023_000
    write_index(directory, weight_map, total_size)
    (directory / "config.json").write_text(json.dumps(released_config_json()))
    (directory / "tokenizer.json").write_text(json.dumps(released_tokenizer_json()))
    return directory


def test_the_released_layout_has_no_deviation(released: Path) -> None:
    assert verify_checkpoint(released) == []


def test_a_lost_shard_is_named_with_the_tensors_that_are_missing_for_it(tmp_path: Path) -> None:
    split_w16(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    names = [deviation.name for deviation in verify_checkpoint(tmp_path)]
    assert names[0] == "model-00001-of-00002.safetensors"
    assert names[1:] == [name for name in tensor_table(read_config(W16)) if name.startswith("layers.")]
