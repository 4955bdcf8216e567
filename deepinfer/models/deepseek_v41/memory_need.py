"""How much memory a rank's weights take, by part, and whether that much is free: asked before anything is read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Final

import torch

from deepinfer.errors import ConfigError
from deepinfer.models.checkpoint_reads import STAGING_BYTES
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.tensor_table import DraftShare, Part, TensorSpec, rank_tensors, tensor_table
from deepinfer.platforms.host_memory import host_memory

_CURES: Final = {
    "device": "Use more ranks, so that each holds fewer experts, or devices with more memory",
    "host": "Use more hosts or larger ones",
}


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of one rank: weights by part, by the names of `Part`.

    `staging_bytes`: host buffers on the way to another device. On the CPU nothing is staged.
    """

    weights: dict[str, int]
    staging_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free bytes as seen by one rank; `device_bytes` is None when the device is the CPU."""

    host_bytes: int
    device_bytes: int | None


def memory_needed(
    config: ModelConfig,
    *,
    expert_ids: tuple[tuple[int, ...], ...],
    draft: DraftShare | None = None,
    num_table_shares: int | None = None,
) -> MemoryNeed:
    """Return what a rank takes that holds the logical experts `expert_ids[layer]` and one share of the n-gram tables.

    `draft` is its share of the draft stages. `num_table_shares` None: the tables are mapped and count nothing, since
    their pages belong to the file cache and can be dropped.
    """
    weights: Counter[str] = Counter()
    for spec in rank_tensors(tensor_table(config).values(), expert_ids, draft):
        if spec.part is not Part.ENGRAM_TABLE:
            weights[spec.part] += spec.num_bytes
        elif num_table_shares is not None:
            weights[spec.part] += _largest_share(spec, num_table_shares)
    return MemoryNeed(dict(weights), STAGING_BYTES)


def table_bytes(config: ModelConfig) -> int:
    """Return what all n-gram tables take."""
    return sum(spec.num_bytes for spec in tensor_table(config).values() if spec.part is Part.ENGRAM_TABLE)


def free_memory(device: torch.device) -> FreeMemory:
    """Measure what is free on the host (the container's limit counts) and on `device`."""
    host_bytes = host_memory().free_bytes
    if device.type == "cpu":
        return FreeMemory(host_bytes, None)
    return FreeMemory(host_bytes, torch.accelerator.get_memory_info(device)[0])


def check_memory(need: MemoryNeed, free: FreeMemory, *, ranks_per_host: int = 1) -> None:
    """Raise `ConfigError` with needed and free bytes by part when the weights don't fit.

    `ranks_per_host` ranks are taken to load on this host at the same time, each with its own device.
    """
    if free.device_bytes is None:
        _require("host", need.weights, free.host_bytes, ranks_per_host)
        return
    _require("device", need.weights, free.device_bytes, 1)
    _require("host", {"buffers on their way to the device": need.staging_bytes}, free.host_bytes, ranks_per_host)


def _require(place: str, parts: Mapping[str, int], free_bytes: int, num_ranks: int) -> None:
    needed = sum(parts.values()) * num_ranks
    if needed <= free_bytes:
        return
    ranks = f" for {num_ranks} ranks" if num_ranks > 1 else ""
    sizes = sorted(parts.items(), key=lambda item: -item[1])
    by_part = ", ".join(f"{part} {_gib(size * num_ranks)}" for part, size in sizes)
    raise ConfigError(
        f"the weights need {_gib(needed)} of {place} memory{ranks}, {_gib(free_bytes)} are free ({by_part}). "
        f"{_CURES[place]}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes < 1000 * 2**30 else f"{num_bytes / 2**30:.0f} GiB"


def _largest_share(spec: TensorSpec, num_shares: int) -> int:
    return -(-spec.shape[0] // num_shares) * (spec.num_bytes // spec.shape[0])
