"""The memory of a rank by part, and the refusal that says what is needed and what is free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_case import W16

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.memory_need import (
    FreeMemory,
    MemoryNeed,
    _container_bytes,
    check_memory,
    free_memory,
    memory_needed,
)
from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.tensor_table import DraftShare
from deepinfer.models.deepseek_v41.weight_types import num_bytes
from deepinfer.models.deepseek_v41.weights import load_weights

GIB = 2**30
NEED = MemoryNeed(device={"routed experts": 3 * GIB, "attention": GIB}, host={"engram tables": GIB}, staging_bytes=GIB)


@pytest.mark.parametrize("draft", [None, DraftShare(), DraftShare((0, 7))])
@pytest.mark.parametrize("map_engram", [True, False])
def test_need_is_what_a_load_takes(map_engram: bool, draft: DraftShare | None) -> None:
    config = read_config(W16)
    expert_ids = ((1, 2, 3), *((5,),) * 11)
    need = memory_needed(config, expert_ids=expert_ids, draft=draft, num_engram_shares=2, map_engram=map_engram)
    weights = load_weights(
        W16,
        config,
        expert_ids=expert_ids,
        device=torch.device("cpu"),
        draft=draft,
        engram_share=(0, 2),
        map_engram=map_engram,
    )
    tables = sum(num_bytes(layer.engram.table) for layer in weights.layers if layer.engram)
    assert sum(need.device.values()) == num_bytes(weights) - tables
    assert sum(need.host.values()) == (0 if map_engram else tables)


def test_need_of_the_released_model_on_64_ranks() -> None:
    need = memory_needed(released_config(), expert_ids=(tuple(range(6)),) * 40, map_engram=False)
    assert need.device["routed experts"] == 40 * 6 * 18_800_640
    assert need.host == {"engram tables": 202_758_032_400}
    assert need.staging_bytes == 129280 * 5120 * 2


def test_enough_is_enough() -> None:
    check_memory(NEED, FreeMemory(host_bytes=2 * GIB, device_bytes=4 * GIB))
    check_memory(NEED, FreeMemory(host_bytes=5 * GIB, device_bytes=None))
    check_memory(NEED, FreeMemory(host_bytes=4 * GIB, device_bytes=4 * GIB), ranks_per_host=2)


@pytest.mark.parametrize(
    ("free", "ranks_per_host", "words"),
    [
        (FreeMemory(2 * GIB, 4 * GIB - 1), 1, r"4 GiB of device memory, 4 GiB are free \(routed experts 3 GiB, attent"),
        (FreeMemory(2 * GIB - 1, 4 * GIB), 1, "2 GiB of host memory.*engram tables 1 GiB"),
        (FreeMemory(5 * GIB - 1, None), 1, "5 GiB of host memory"),
        (FreeMemory(9 * GIB, None), 2, "10 GiB of host memory for 2 ranks, 9 GiB are free"),
    ],
)
def test_refusal_names_needed_and_free(free: FreeMemory, ranks_per_host: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_memory(NEED, free, ranks_per_host=ranks_per_host)


def test_free_memory_of_the_cpu() -> None:
    free = free_memory(torch.device("cpu"))
    assert free.device_bytes is None
    assert free.host_bytes > 0


def test_a_container_limit_counts(tmp_path: Path) -> None:
    assert _container_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _container_bytes(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_bytes(tmp_path) is None
