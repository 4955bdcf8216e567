"""How many cache blocks and slots a rank gets from the memory it may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepinfer.config import CacheConfig, ClusterConfig
from deepinfer.errors import ConfigError
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.platforms.platform import Platform
from deepinfer.protocol import Role
from deepinfer.runtime.slot_table import TOKEN_BYTES

CPU_CACHE_BYTES: Final = 256 * 1024 * 1024
_BLOCK_ID_BYTES: Final = 8


@dataclass(slots=True, frozen=True)
class CacheSize:
    """Blocks per paged group and slots, both with the padding entry 0; `num_bytes` they take in all."""

    num_blocks: dict[str, int]
    num_slots: int
    num_bytes: int


def cache_budget(config: CacheConfig, platform: Platform, *, ranks_per_device: int, step_bytes: int = 0) -> int:
    """Return the bytes for caches and slot table: as configured, else 256 MiB on a CPU, else a share of what is free.

    Of a device that `ranks_per_device` ranks share, each may have an equal part, whoever loads first: what this rank
    holds already counts against its part, and `step_bytes`, what a step will need. Call it after the weights are
    loaded. Raises ConfigError when a configured size is not free.
    """
    memory = platform.memory_info()
    if config.memory_bytes is None:
        if platform.name == "cpu":
            return min(CPU_CACHE_BYTES, memory.free_bytes)
        part_bytes = memory.total_bytes // ranks_per_device - memory.own_bytes
        return int(max(0, min(memory.free_bytes, part_bytes) - step_bytes) * config.memory_fraction)
    if config.memory_bytes > memory.free_bytes - step_bytes:
        free = f"{memory.free_bytes} are free" + (f", of which a step needs {step_bytes}" if step_bytes else "")
        message = f"{config.memory_bytes} bytes are asked for, {free}"
        if config.handover_bytes:
            message += f"; {config.handover_bytes} more are held for hand-overs (cache.handover_bytes)"
        raise ConfigError(message, path="cache.memory_bytes")
    return config.memory_bytes


def most_exchanged_rows(config: ClusterConfig, role: Role, *, draft_block_size: int) -> int:
    """Return how many rows a rank sends to experts in a pass at the most: of a step, or of a draft pass.

    That one has a whole block of drafts for each sequence, and its anchor; `draft_block_size` 0: there is none.
    """
    if role == "prefill":
        return config.prefill.step_tokens
    return (config.decode.max_running + 1) * (1 + draft_block_size)


def size_caches(
    groups: tuple[KVGroup, ...],
    *,
    budget_bytes: int,
    max_running: int,
    max_model_len: int,
    draft_bytes_per_slot: int = 0,
) -> CacheSize:
    """Return as many blocks as the budget holds, and no more than `max_running` longest sequences need.

    Slots come first: one per running sequence, with its blocks in "sequence" groups and its rows of the slot table,
    which take `draft_bytes_per_slot` more where drafts are in use.
    Raises ConfigError unless one sequence of `max_model_len` tokens fits.
    """
    paged = [group for group in groups if group.kind == "paged"]
    num_slots = max_running + 1
    slot_bytes = (_bytes_per_slot(groups, max_model_len) + draft_bytes_per_slot) * num_slots
    padding_bytes = sum(group.bytes_per_block for group in paged)
    sequence_bytes = sum(group.bytes_per_block * group.num_blocks_for(max_model_len) for group in paged)
    needed = slot_bytes + padding_bytes + sequence_bytes
    if needed > budget_bytes:
        raise ConfigError(
            f"{needed} bytes are needed for {max_running} slots and one sequence of {max_model_len} tokens, "
            f"{budget_bytes} are there; raise cache.memory_bytes, or lower model.max_model_len or max_running",
            path="cache.memory_bytes",
        )
    # Longest sequences that fit, with a fraction: every paged group gets room for the same number of tokens.
    num_sequences = min((budget_bytes - slot_bytes - padding_bytes) / max(1, sequence_bytes), max_running)
    num_blocks = {group.name: 1 + int(num_sequences * group.num_blocks_for(max_model_len)) for group in paged}
    num_bytes = slot_bytes + sum(group.bytes_per_block * num_blocks[group.name] for group in paged)
    return CacheSize(num_blocks, num_slots, num_bytes)


def _bytes_per_slot(groups: tuple[KVGroup, ...], max_model_len: int) -> int:
    rings = sum(group.bytes_per_block for group in groups if group.kind == "sequence")
    tables = sum(group.num_blocks_for(max_model_len) for group in groups if group.kind == "paged") * _BLOCK_ID_BYTES
    return rings + tables + max_model_len * TOKEN_BYTES
