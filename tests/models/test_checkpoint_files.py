"""Headers, index and byte ranges of safetensors files: right ones are read exactly, each fault is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_case import W16, copy_w16, read_header, read_tensor, split_w16, write_file, write_index
from safetensors.torch import load_file

from deepinfer.errors import CheckpointError
from deepinfer.models.checkpoint_files import open_checkpoint, scan_checkpoint

TABLE = "layers.1.engram.embed.weight"
SHARD = "model-00001-of-00002.safetensors"


def faults(directory: Path) -> list[str]:
    return [str(deviation) for deviation in scan_checkpoint(directory)[1]]


DEEP_HEADER = (100_000).to_bytes(8, "little") + b"[" * 100_000


def test_every_tensor_is_read_bit_for_bit() -> None:
    files, expected = open_checkpoint(W16), load_file(W16 / "model.safetensors")
    assert files.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        assert files.entries[name].shape == tuple(tensor.shape)
        assert torch.equal(read_tensor(files, name).view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def test_scales_and_fp4_codes_arrive_as_bytes() -> None:
    files = open_checkpoint(W16)
    assert read_tensor(files, "layers.0.attn.wq_a.scale").dtype == torch.uint8
    assert read_tensor(files, "layers.0.ffn.experts.0.w1.weight").dtype == torch.uint8
    assert read_tensor(files, "layers.0.attn.wq_a.weight").dtype == torch.float8_e4m3fn


def test_a_mapped_tensor_is_the_tensor() -> None:
    files = open_checkpoint(W16)
    mapped = files.map(TABLE)
    assert mapped.dtype == torch.float8_e4m3fn
    assert torch.equal(mapped.view(torch.uint8), read_tensor(files, TABLE).view(torch.uint8))


def test_head_of_a_tensor() -> None:
    files = open_checkpoint(W16)
    content = read_tensor(files, TABLE).view(torch.uint8).numpy().tobytes()
    assert files.read_head(TABLE, 10) == content[:10]
    assert (
        files.read_head("layers.0.hc_attn_scale", 1000)
        == read_tensor(files, "layers.0.hc_attn_scale").numpy().tobytes()
    )


def test_shards_read_like_the_single_file(tmp_path: Path) -> None:
    files, single = open_checkpoint(split_w16(tmp_path)), open_checkpoint(W16)
    assert [path.name for path in files.files] == [SHARD, "model-00002-of-00002.safetensors"]
    assert files.entries.keys() == single.entries.keys()
    for name in ("embed.weight", "layers.3.attn.wkv.weight"):
        assert torch.equal(read_tensor(files, name).view(torch.uint8), read_tensor(single, name).view(torch.uint8))


def test_nothing_there(tmp_path: Path) -> None:
    assert faults(tmp_path) == ["model.safetensors.index.json: does not exist, nor does model.safetensors"]
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)
    assert "not a directory" in faults(tmp_path / "missing")[0]


def test_missing_shard_is_one_fault(tmp_path: Path) -> None:
    split_w16(tmp_path)
    (tmp_path / SHARD).unlink()
    assert faults(tmp_path) == [f"{SHARD}: does not exist, but tensors should be in it"]


@pytest.mark.parametrize("cut", [4, 100])
def test_file_cut_inside_its_header(tmp_path: Path, cut: int) -> None:
    split_w16(tmp_path)
    (tmp_path / SHARD).write_bytes((tmp_path / SHARD).read_bytes()[:cut])
    assert [fault.split(":")[0] for fault in faults(tmp_path)] == [SHARD]


def test_file_cut_inside_its_data_names_the_lost_tensors(tmp_path: Path) -> None:
    copy_w16(tmp_path)
    path = tmp_path / "model.safetensors"
    header, data = read_header(path)
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    write_file(path, header, data[:-1])
    assert len(faults(tmp_path)) == 1
    assert f"{last}: ends at byte" in faults(tmp_path)[0]


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{[", b"\x02" + b"\0" * 7 + b"[]", DEEP_HEADER]
)
def test_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "is not a safetensors file" in faults(tmp_path)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "F64"}, "dtype F64"),
        ({"dtype": []}, "dtype []"),
        ({"shape": [513, 128]}, "needs 131328 bytes"),
        ({"data_offsets": [0]}, "broken header entry"),
        ({"data_offsets": [0, 131072]}, "shares bytes"),
    ],
)
def test_wrong_header_entry_names_the_tensor(tmp_path: Path, change: dict[str, object], words: str) -> None:
    copy_w16(tmp_path)
    path = tmp_path / "model.safetensors"
    header, data = read_header(path)
    header["head.weight"] |= change
    write_file(path, header, data)
    assert any(words in fault for fault in faults(tmp_path))
    assert words == "shares bytes" or faults(tmp_path)[0].startswith("head.weight: ")


def test_index_that_disagrees_with_the_files(tmp_path: Path) -> None:
    split_w16(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    weight_map, size = index["weight_map"], index["metadata"]["total_size"]
    write_index(tmp_path, weight_map, size + 1)
    assert "total_size" in faults(tmp_path)[0]
    write_index(tmp_path, weight_map | {"norm.weight": SHARD}, size)
    assert any(fault.startswith("norm.weight: is in model-00002") for fault in faults(tmp_path))
    write_index(tmp_path, weight_map | {"extra.weight": SHARD}, size)
    assert faults(tmp_path) == [f"extra.weight: is not in {SHARD}, where the index has it"]
    del weight_map["norm.weight"]
    write_index(tmp_path, weight_map, size)
    assert "norm.weight: is in model-00002-of-00002.safetensors, but the index does not list it" in faults(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
        '{"weight_map": {"a": "b\\u0000"}}',
        '{"metadata": {"total_size": "big"}, "weight_map": {"a": "b"}}',
    ],
)
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert len(faults(tmp_path)) == 1
    assert faults(tmp_path)[0].startswith("model.safetensors.index.json: ")


def test_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    files = open_checkpoint(copy_w16(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: files.entries[TABLE].begin + 5])
    with pytest.raises(CheckpointError, match=TABLE):
        read_tensor(files, TABLE)
