"""Random weights have the shapes and formats of loaded ones; a cut or shared model is still a valid one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.config import TablePlace
from deepinfer.models.deepseek_v41.config_checks import check_config
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.random_weights import random_weights, with_layers, with_table_share
from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.tensor_table import DraftShare
from deepinfer.models.deepseek_v41.tiny import write_tiny
from deepinfer.models.deepseek_v41.weight_types import Weights, tensors_of
from deepinfer.models.deepseek_v41.weights import load_weights

CPU = torch.device("cpu")


def shapes(weights: Weights) -> list[tuple[torch.Size, torch.dtype]]:
    parts = (*weights.layers, weights.draft_rings, weights.draft, weights.embed, weights.head, weights.norm)
    return [(tensor.shape, tensor.dtype) for part in parts for tensor in tensors_of(part)]


def test_every_tensor_is_shaped_like_the_one_that_a_rank_loads(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    write_tiny(directory)
    config, draft = read_config(directory), DraftShare((2, 3))
    made = random_weights(config, expert_ids=(4, 5, 6), draft=draft, device=CPU, tables="host")
    loaded = load_weights(directory, config, expert_ids=((4, 5, 6),) * config.num_layers, device=CPU, draft=draft)
    assert shapes(made) == shapes(loaded)


@pytest.mark.parametrize("tables", ["host", "sharded"])
def test_tables_lie_where_those_of_a_rank_do(tables: TablePlace) -> None:
    """Look-ups in host memory cost more, so a benchmark must not have them on the device; more rows than are drawn."""
    config = with_table_share(with_layers(released_config(), 3), num_shares=1500)
    device = torch.device("meta")
    weights = random_weights(config, expert_ids=(0,), draft=None, device=device, tables=tables)
    (table,) = (layer.engram.table for layer in weights.layers if layer.engram is not None)
    assert len(table.weight) == len(table.scale) == table.num_rows == config.engram_num_embeddings[0] > 200_003
    assert table.weight.device.type == table.scale.device.type == ("cpu" if tables == "host" else "meta")


@pytest.mark.parametrize("num_layers", [3, 6, 15, 20, 21, 25, 40])
def test_a_cut_model_is_valid(num_layers: int) -> None:
    config = with_table_share(with_layers(released_config(), num_layers), num_shares=64)
    check_config(config)
    assert config.num_layers == num_layers
    assert config.dspark_target_layer_ids[-1] == num_layers - 1


def test_tables_are_cut_to_a_share_of_their_rows() -> None:
    whole = released_config()
    part = with_table_share(whole, num_shares=64)
    assert len(part.engram_num_embeddings) == len(whole.engram_num_embeddings)
    for rows, all_rows in zip(part.engram_num_embeddings, whole.engram_num_embeddings, strict=True):
        assert 64 * rows == pytest.approx(all_rows, rel=0.01)
