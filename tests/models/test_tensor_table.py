"""The tensor table against the published totals and the headers of the golden checkpoint."""

from __future__ import annotations

from collections import Counter

import pytest
from checkpoint_case import W16, read_header

from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.tensor_table import (
    DraftShare,
    Part,
    TensorSpec,
    is_image_tensor,
    rank_tensors,
    tensor_table,
)

NUM_IMAGE_TENSORS, IMAGE_BYTES = 266, 970_536_960


@pytest.fixture(scope="module")
def table() -> dict[str, TensorSpec]:
    return tensor_table(released_config())


def test_number_of_tensors(table: dict[str, TensorSpec]) -> None:
    num_draft = sum(spec.part is Part.DRAFT for spec in table.values())
    assert num_draft == sum(name.startswith("mtp.") for name in table) == 2401
    assert len(table) - num_draft == 93418
    assert len(table) + NUM_IMAGE_TENSORS == 96085
    assert sum(name.startswith("layers.0.") for name in table) == 2334


def test_bytes_of_each_part(table: dict[str, TensorSpec]) -> None:
    """The audited sizes of the released files, to the byte."""
    size: Counter[Part] = Counter()
    for spec in table.values():
        size[spec.part] += spec.num_bytes
    assert size[Part.ROUTED_EXPERT] == 288_777_830_400
    assert size[Part.ATTENTION] == 5_069_568_000
    assert size[Part.SHARED_EXPERT] == 1_416_960_000
    assert size[Part.ROUTER] == 157_409_280
    assert size[Part.HYPER_CONNECTION] == 157_295_040
    assert size[Part.COMPRESSOR] == 36_704_256
    assert size[Part.INDEXER] == 45_130_752
    assert size[Part.EMBEDDING] == 2_647_654_400
    assert size[Part.ENGRAM_PROJECTION] == 315_043_840
    assert size[Part.ENGRAM_TABLE] == 202_758_032_400
    assert size[Part.DRAFT] == 7_932_874_632
    assert size.total() - size[Part.DRAFT] == 501_382_611_408
    assert size.total() + IMAGE_BYTES == 510_286_023_000
    assert sum(spec.num_bytes for spec in table.values() if spec.layer == 0) == 7_389_500_888


def test_golden_headers_are_the_table() -> None:
    header, _ = read_header(W16 / "model.safetensors")
    del header["__metadata__"]
    found = {name: (fields["dtype"], tuple(fields["shape"])) for name, fields in header.items()}
    assert found == {name: (spec.dtype, spec.shape) for name, spec in tensor_table(read_config(W16)).items()}


def test_a_rank_reads_its_experts_and_all_else_once() -> None:
    table = tensor_table(read_config(W16))
    expert_ids = ((3, 0, 3), *((),) * 11)
    names = Counter(spec.name for spec in rank_tensors(table.values(), expert_ids))
    experts = {name: count for name, count in names.items() if ".experts." in name}
    assert {name.split(".")[4] for name in experts} == {"0", "3"}
    assert experts["layers.0.ffn.experts.3.w2.scale"] == 2
    assert len(experts) == 12
    assert not any(name.startswith("mtp.") or name.endswith("bias_vl") for name in names)
    others = [name for name, spec in table.items() if spec.expert is None and spec.stage is None and spec.is_read]
    assert all(names[name] == 1 for name in others)
    assert len(names) == len(others) + 12


def test_a_rank_reads_its_share_of_the_draft_stages() -> None:
    """All 2,401 tensors but three image biases; or what fills the rings: two maps and two norms and a scale each."""
    table = tensor_table(released_config())
    no_experts: tuple[tuple[int, ...], ...] = ((),) * 40

    def names(share: DraftShare) -> list[str]:
        specs = rank_tensors(table.values(), no_experts, share)
        return [spec.name for spec in specs if spec.stage is not None]

    everything = names(DraftShare(tuple(range(128))))
    unread = {name for name, spec in table.items() if spec.stage is not None} - set(everything)
    assert (len(everything), len(set(everything))) == (2398, 2398)
    assert unread == {f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(3)}
    rings = names(DraftShare(None))
    assert rings[-3:] == ["mtp.2.attn.wkv.weight", "mtp.2.attn.wkv.scale", "mtp.2.attn.kv_norm.weight"]
    assert len(rings) == 3 + 3 * 3
    some = names(DraftShare((5, 7, 5)))
    assert sum(".experts.5." in name for name in some) == 2 * 18
    assert sum(".experts." in name for name in some) == 3 * 18


@pytest.mark.parametrize("name", ["vision.blocks.0.attn.wqkv.weight", "aligner.norm.weight", "image_newline"])
def test_image_tensors_are_known(name: str) -> None:
    assert is_image_tensor(name)


@pytest.mark.parametrize("name", ["visions.weight", "layers.0.vision.weight", "image_startx"])
def test_image_names_are_no_substring_rule(name: str) -> None:
    assert not is_image_tensor(name)
