"""Cache sizes from a budget, and refusals with numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from deepinfer.config import CacheConfig
from deepinfer.errors import ConfigError
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.platforms.platform import MemoryInfo, load_platform
from deepinfer.runtime.device_memory import cache_budget, size_caches

GROUPS = (
    KVGroup("wide", "paged", 10, 1000, True, "w"),
    KVGroup("narrow", "paged", 50, 100, True, "n"),
    KVGroup("ring", "sequence", 16, 500, False, "r"),
)
# One slot: ring 500, block ids (10 + 2) * 8, 100 token ids of 4 bytes.
SLOT_BYTES = 500 + 96 + 400
SEQUENCE_BYTES = 10 * 1000 + 2 * 100


def _size(budget_bytes: int, max_running: int = 3):
    return size_caches(GROUPS, budget_bytes=budget_bytes, max_running=max_running, max_model_len=100)


def test_no_more_than_all_running_sequences_need() -> None:
    size = _size(10**9)
    assert (size.num_blocks, size.num_slots) == ({"wide": 31, "narrow": 7}, 4)
    assert size.num_bytes == 4 * SLOT_BYTES + 1100 + 3 * SEQUENCE_BYTES


def test_a_smaller_budget_gives_every_group_the_same_number_of_tokens() -> None:
    budget = 4 * SLOT_BYTES + 1100 + int(1.5 * SEQUENCE_BYTES)
    size = _size(budget)
    assert size.num_blocks == {"wide": 16, "narrow": 4}
    assert size.num_bytes <= budget


def test_one_longest_sequence_has_to_fit() -> None:
    needed = 4 * SLOT_BYTES + 1100 + SEQUENCE_BYTES
    assert _size(needed).num_blocks == {"wide": 11, "narrow": 3}
    with pytest.raises(ConfigError, match=rf"cache\.memory_bytes: {needed} bytes are needed .* {needed - 1} are there"):
        _size(needed - 1)


def test_the_budget_of_a_cpu() -> None:
    platform = load_platform("cpu")
    assert cache_budget(CacheConfig(memory_bytes=12345), platform, ranks_per_device=1) == 12345
    assert cache_budget(CacheConfig(), platform, ranks_per_device=1) <= 256 * 1024 * 1024
    with pytest.raises(ConfigError, match=r"cache\.memory_bytes: .* are free"):
        cache_budget(CacheConfig(memory_bytes=2**60), platform, ranks_per_device=1)


@dataclass
class Gpu:
    """As much of a platform as the budget looks at."""

    memory: MemoryInfo
    name: str = "nvidia"

    def memory_info(self) -> MemoryInfo:
        return self.memory


@pytest.mark.parametrize(
    ("own", "free", "ranks", "budget"),
    [
        (300, 700, 1, 350),  # alone: half of what is free
        (300, 700, 2, 100),  # the other rank has loaded nothing yet, and is left its 500
        (300, 200, 2, 100),  # the other rank has taken its 500
        (300, 100, 2, 50),  # somebody else is there too
        (600, 400, 2, 0),  # the weights alone are more than the part
    ],
)
def test_ranks_that_share_a_gpu_get_equal_parts_of_it(own: int, free: int, ranks: int, budget: int) -> None:
    gpu: Any = Gpu(MemoryInfo(total_bytes=1000, free_bytes=free, own_bytes=own))
    assert cache_budget(CacheConfig(memory_fraction=0.5), gpu, ranks_per_device=ranks) == budget


def test_what_a_step_needs_is_left_for_it() -> None:
    gpu: Any = Gpu(MemoryInfo(total_bytes=1000, free_bytes=700, own_bytes=300))
    assert cache_budget(CacheConfig(memory_fraction=0.5), gpu, ranks_per_device=1, step_bytes=100) == 300
    assert cache_budget(CacheConfig(memory_fraction=0.5), gpu, ranks_per_device=2, step_bytes=100) == 50
    assert cache_budget(CacheConfig(memory_bytes=600), gpu, ranks_per_device=1, step_bytes=100) == 600
    with pytest.raises(ConfigError, match="700 are free, of which a step needs 101"):
        cache_budget(CacheConfig(memory_bytes=600), gpu, ranks_per_device=1, step_bytes=101)
