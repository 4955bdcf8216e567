"""The memory of a rank by part, and the refusal that says what is needed and what is free."""

from __future__ import annotations

import pytest
import torch
from checkpoint_case import W16

from deepinfer.errors import ConfigError
from deepinfer.models.checkpoint_reads import STAGING_BYTES
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.memory_need import (
    FreeMemory,
    MemoryNeed,
    check_memory,
    free_memory,
    memory_needed,
    table_bytes,
)
from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.tensor_table import DraftShare
from deepinfer.models.deepseek_v41.weight_types import num_bytes
from deepinfer.models.deepseek_v41.weights import TableShare, load_weights

GIB = 2**30
NEED = MemoryNeed(weights={"routed experts": 3 * GIB, "attention": GIB}, staging_bytes=2 * GIB)


@pytest.mark.parametrize("draft", [None, DraftShare(), DraftShare((0, 7))])
@pytest.mark.parametrize("num_table_shares", [None, 2])
def test_need_is_what_a_load_takes(num_table_shares: int | None, draft: DraftShare | None) -> None:
    config = read_config(W16)
    expert_ids = ((1, 2, 3), *((5,),) * 11)
    need = memory_needed(config, expert_ids=expert_ids, draft=draft, num_table_shares=num_table_shares)
    weights = load_weights(
        W16,
        config,
        expert_ids=expert_ids,
        device=torch.device("cpu"),
        draft=draft,
        table_share=None if num_table_shares is None else TableShare(0, num_table_shares),
    )
    mapped = 0
    if num_table_shares is None:
        mapped = sum(num_bytes(layer.engram.table) for layer in weights.layers if layer.engram)
        assert mapped == table_bytes(config)
    assert sum(need.weights.values()) == num_bytes(weights) - mapped


def test_need_of_the_released_model_on_64_ranks() -> None:
    need = memory_needed(released_config(), expert_ids=(tuple(range(6)),) * 40, num_table_shares=64)
    assert need.weights["routed experts"] == 40 * 6 * 18_800_640
    assert table_bytes(released_config()) == 202_758_032_400
    assert need.weights["engram tables"] == pytest.approx(202_758_032_400 / 64, rel=1e-6)
    assert need.staging_bytes == STAGING_BYTES


def test_enough_is_enough() -> None:
    check_memory(NEED, FreeMemory(host_bytes=2 * GIB, device_bytes=4 * GIB))
    check_memory(NEED, FreeMemory(host_bytes=4 * GIB, device_bytes=None))
    check_memory(NEED, FreeMemory(host_bytes=4 * GIB, device_bytes=4 * GIB), ranks_per_host=2)


@pytest.mark.parametrize(
    ("free", "ranks_per_host", "words"),
    [
        (FreeMemory(2 * GIB, 4 * GIB - 1), 1, r"4 GiB of device memory, 4 GiB are free \(routed experts 3 GiB, attent"),
        (FreeMemory(2 * GIB - 1, 4 * GIB), 1, "2 GiB of host memory.*buffers on their way to the device 2 GiB"),
        (FreeMemory(4 * GIB - 1, None), 1, "4 GiB of host memory"),
        (FreeMemory(7 * GIB, None), 2, "8 GiB of host memory for 2 ranks, 7 GiB are free"),
    ],
)
def test_refusal_names_needed_and_free(free: FreeMemory, ranks_per_host: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_memory(NEED, free, ranks_per_host=ranks_per_host)


def test_free_memory_of_the_cpu() -> None:
    free = free_memory(torch.device("cpu"))
    assert free.device_bytes is None
    assert free.host_bytes > 0
