"""Loading: the tree holds the right bytes, only the rank's share is read, every fault is found before reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import W16, copy_w16, read_header, split_w16, write_file
from safetensors.torch import load_file

from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.checkpoint_files import FileRange
from deepinfer.models.checkpoint_reads import LoadProgress, NodePlace, Read
from deepinfer.models.deepseek_v41 import weights as weights_file
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.engram_shards import rows_of_share
from deepinfer.models.deepseek_v41.memory_need import FreeMemory
from deepinfer.models.deepseek_v41.tensor_table import DraftShare
from deepinfer.models.deepseek_v41.weight_types import Weights, num_bytes, tensors_of
from deepinfer.models.deepseek_v41.weights import TableShare, load_weights

CONFIG = read_config(W16)
ALL_EXPERTS = tuple(tuple(range(CONFIG.n_routed_experts)) for _ in range(CONFIG.num_layers))
NO_EXPERTS: tuple[tuple[int, ...], ...] = ((),) * CONFIG.num_layers
CPU = torch.device("cpu")


def load(directory: Path = W16, expert_ids: tuple[tuple[int, ...], ...] = NO_EXPERTS, **options: Any) -> Weights:
    return load_weights(directory, CONFIG, expert_ids=expert_ids, device=CPU, **options)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


def test_every_part_holds_its_tensor() -> None:
    weights, file = load(expert_ids=ALL_EXPERTS), load_file(W16 / "model.safetensors")
    assert same(weights.head, file["head.weight"])
    layer = weights.layers[5]  # KV source, index source, engram
    assert layer.attention.compressor is not None
    assert layer.attention.indexer is not None
    assert layer.engram is not None
    expected = {
        "attn_norm.weight": layer.attn_norm,
        "ffn_norm.weight": layer.ffn_norm,
        "hc_attn_fn": layer.hc_attn.fn,
        "hc_ffn_base": layer.hc_ffn.base,
        "hc_ffn_scale": layer.hc_ffn.scale,
        "attn.wq_a.weight": layer.attention.wq_a.weight,
        "attn.wo_b.scale": layer.attention.wo_b.scale,
        "attn.attn_sink": layer.attention.attn_sink,
        "attn.compressor.wgate.weight": layer.attention.compressor.wgate,
        "attn.compressor.norm.weight": layer.attention.compressor.norm,
        "attn.indexer.wq_b.weight": layer.attention.indexer.wq_b.weight,
        "attn.indexer.wk.weight": layer.attention.indexer.wk,
        "ffn.gate.bias": layer.moe.gate_bias,
        "ffn.shared_experts.w2.weight": layer.moe.shared.w2.weight,
        "ffn.experts.7.w1.weight": layer.moe.experts.w1[7],
        "ffn.experts.7.w2.scale": layer.moe.experts.w2_scale[7],
        "ffn.experts.23.w3.weight": layer.moe.experts.w3[23],
        "engram.wkv.scale": layer.engram.wkv.scale,
        "engram.q_weight": layer.engram.q_weight,
        "engram.embed.weight": layer.engram.table.weight,
        "engram.embed.scale": layer.engram.table.scale,
    }
    for name, tensor in expected.items():
        assert tensor is not None
        assert same(tensor, file[f"layers.5.{name}"]), name


def test_only_sources_have_compressor_indexer_and_tables() -> None:
    layers = load().layers
    assert [bool(layer.attention.compressor) for layer in layers] == [number in (2, 5, 7) for number in range(12)]
    assert [bool(layer.attention.indexer) for layer in layers] == [number in (2, 5, 7, 9, 11) for number in range(12)]
    assert [bool(layer.engram) for layer in layers] == [number in (1, 5) for number in range(12)]
    seven, nine = layers[7].attention, layers[9].attention
    assert seven.compressor is not None
    assert seven.compressor.wgate is None  # ratio 1
    assert nine.indexer is not None
    assert nine.indexer.wk is None  # selects again among layer 7's keys


def test_nothing_else_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names read for one rank: its own experts, no image bias, no draft stage; only these experts are its own."""
    reads: list[Read] = []
    monkeypatch.setattr(weights_file, "read_all", lambda all_reads, **_: reads.extend(all_reads))
    weights = load(expert_ids=((2, 5), (5,), *((),) * 10))
    names = [read.name for read in reads]
    assert {name for name in names if ".experts." in name and name.endswith("w1.weight")} == {
        "layers.0.ffn.experts.2.w1.weight",
        "layers.0.ffn.experts.5.w1.weight",
        "layers.1.ffn.experts.5.w1.weight",
    }
    assert len(names) == len(set(names))
    assert not any(name.startswith("mtp.") or name.endswith(("bias_vl", "embed.scale")) for name in names)
    assert all(read.is_shared != (".experts." in read.name) for read in reads)
    assert weights.layers[2].moe.experts.w2.shape == (0, 128, 32)


def test_draft_stages_hold_their_tensors() -> None:
    weights, file = load(draft=DraftShare((6, 1))), load_file(W16 / "model.safetensors")
    rings, draft = weights.draft_rings, weights.draft
    assert rings is not None
    assert draft is not None
    assert len(draft.stages) == len(rings.wkv) == 3
    expected = {
        "0.main_proj.scale": rings.main_proj.scale,
        "0.main_norm.weight": rings.main_norm,
        "1.attn.wkv.weight": rings.wkv[1].weight,
        "2.attn.kv_norm.weight": rings.kv_norm[2],
        "1.attn.wo_a.weight": draft.stages[1].attention.wo_a.weight,
        "1.hc_ffn_fn": draft.stages[1].hc_ffn.fn,
        "1.ffn.gate.bias": draft.stages[1].moe.gate_bias,
        "1.ffn.experts.6.w3.scale": draft.stages[1].moe.experts.w3_scale[0],
        "1.ffn.experts.1.w2.weight": draft.stages[1].moe.experts.w2[1],
        "1.ffn.shared_experts.w1.weight": draft.stages[1].moe.shared.w1.weight,
        "2.norm.weight": draft.norm,
        "2.markov_head.embed.weight": draft.markov_embed,
        "2.markov_head.head.weight": draft.markov_head,
        "2.confidence_head.proj.weight": draft.confidence,
    }
    for name, tensor in expected.items():
        assert same(tensor, file[f"mtp.{name}"]), name


def test_rings_are_the_same_with_and_without_the_stages() -> None:
    rings = load(draft=DraftShare()).draft_rings
    full = load(draft=DraftShare(())).draft_rings
    assert rings is not None
    assert all(same(one, other) for one, other in zip(tensors_of(rings), tensors_of(full), strict=True))
    assert load(draft=DraftShare()).draft is None
    assert load().draft_rings is None


def test_experts_stand_in_the_order_asked_for() -> None:
    experts = load(expert_ids=((9, 1, 9), *((),) * 11)).layers[0].moe.experts
    assert experts.expert_ids == (9, 1, 9)
    assert same(experts.w1[0], experts.w1[2])
    file = load_file(W16 / "model.safetensors")
    assert same(experts.w1[1], file["layers.0.ffn.experts.1.w1.weight"])


def test_table_shares_cover_the_table() -> None:
    file, rows, scales = load_file(W16 / "model.safetensors"), [], []
    for share in range(4):
        engram = load(table_share=TableShare(share, 4)).layers[1].engram
        assert engram is not None
        assert engram.table.first_row == sum(len(part) for part in rows)
        assert engram.table.num_rows == 1362
        rows.append(engram.table.weight.view(torch.uint8))
        scales.append(engram.table.scale)
    assert same(torch.cat(rows), file["layers.1.engram.embed.weight"])
    assert same(torch.cat(scales), file["layers.1.engram.embed.scale"])


@pytest.mark.parametrize("num_shares", [1, 3, 7, 20])
def test_runs_of_rows_are_disjoint_and_complete(num_shares: int) -> None:
    runs = [rows_of_share(10, share, num_shares) for share in range(num_shares)]
    assert [row for first, end in runs for row in range(first, end)] == list(range(10))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_shards_and_progress(tmp_path: Path, index: int) -> None:
    """All of the tree is read, whichever part a rank of a node begins with; bytes are counted to the end."""
    told: list[LoadProgress] = []
    weights = load(split_w16(tmp_path), expert_ids=ALL_EXPERTS, place=NodePlace(index, 3), on_progress=told.append)
    assert all(
        same(one, other)
        for one, other in zip(tensors_of(weights), tensors_of(load(expert_ids=ALL_EXPERTS)), strict=True)
    )
    tables = sum(num_bytes(layer.engram.table) for layer in weights.layers if layer.engram)
    ends = {step.what: step.done_bytes for step in told if step.done_bytes == step.total_bytes}
    assert ends["loading weights"] == num_bytes(weights) - tables
    assert "reading n-gram tables ahead" in ends


def test_tables_without_room_are_not_read_ahead(caplog: pytest.LogCaptureFixture) -> None:
    """Look-ups then wait for the storage, and the log says so."""
    told: list[LoadProgress] = []
    with caplog.at_level("WARNING"):
        weights_file._read_tables_ahead(
            [FileRange(W16 / "model.safetensors", 0, 1 << 30)], FreeMemory(1 << 29, None), NodePlace(), told.append
        )
    assert not told
    assert "look-ups will wait for the storage" in caplog.text


def _edit(directory: Path, name: str, change: dict[str, Any] | None) -> Path:
    path = copy_w16(directory) / "model.safetensors"
    header, data = read_header(path)
    fields = header.pop(name)
    if change is not None:
        header[change.pop("name", name)] = fields | change
    write_file(path, header, data)
    return directory


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("layers.4.ffn.experts.3.w2.scale", None, "is missing"),
        ("mtp.1.attn.wo_b.weight", None, "is missing"),
        ("layers.0.attn.wq_a.scale", {"shape": [8, 1]}, r"F8_E8M0 \[2, 4\] is needed"),
        ("layers.0.attn.wq_a.scale", {"dtype": "U8"}, "is U8"),
        ("layers.0.ffn.experts.0.w1.weight", {"dtype": "F8_E4M3"}, "I8"),
        ("layers.0.attn.wq_b.weight", {"shape": [64, 256]}, r"is F8_E4M3 \[64, 256\]"),
    ],
)
def test_a_fault_names_the_tensor(tmp_path: Path, name: str, change: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: .*{words}"):
        load(_edit(tmp_path, name, change))


def test_an_unexpected_tensor_is_refused(tmp_path: Path) -> None:
    """A renamed scale is missing under its name, and unexpected under the other."""
    renamed = {"name": "layers.0.attn.wq_a.weight_scale_inv"}
    with pytest.raises(CheckpointError, match=r"wq_a\.scale: is missing \(and 1 more"):
        load(_edit(tmp_path, "layers.0.attn.wq_a.scale", renamed))


def test_image_tensors_are_skipped(tmp_path: Path) -> None:
    path = copy_w16(tmp_path) / "model.safetensors"
    header, data = read_header(path)
    header["vision.norm.weight"] = {"dtype": "BF16", "shape": [2], "data_offsets": [len(data), len(data) + 4]}
    write_file(path, header, data + b"\0" * 4)
    assert num_bytes(load(tmp_path)) == num_bytes(load())


def test_p57_too_little_memory_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "read_all", None)
    with pytest.raises(ConfigError, match=r"need 0\.0\d+ GiB of host memory.*routed experts"):
        load(expert_ids=ALL_EXPERTS, free=FreeMemory(host_bytes=6_000_000, device_bytes=None))
