"""The only door to cache bookkeeping: slots and blocks of every sequence over all groups of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.kv_cache.block_pool import BlockPool
from deepinfer.kv_cache.kv_groups import KVGroup


@dataclass(slots=True, frozen=True)
class BlockRun:
    """`block_ids` continue a sequence's block table in the paged group `group` from entry `first_index` on."""

    group: str
    first_index: int
    block_ids: npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class Reservation:
    """What a new sequence got: its slot (also its block id in every "sequence" group) and its first blocks."""

    slot: int
    runs: tuple[BlockRun, ...]


@dataclass(slots=True)
class _Holding:
    """What one sequence holds."""

    slot: int
    block_ids: dict[str, list[int]] = field(default_factory=dict)


class CacheManager:
    """Block accounting of one rank. A sequence is known by its index. Not thread-safe: the step thread owns it.

    Slot 0 and block 0 of every group belong to padding rows. A call that returns None has taken nothing.
    """

    def __init__(self, groups: tuple[KVGroup, ...], *, num_blocks: dict[str, int], num_slots: int) -> None:
        """`num_blocks` per paged group and `num_slots` count the padding block and slot."""
        self._groups = tuple(group for group in groups if group.kind == "paged")
        self._pools = {group.name: BlockPool(num_blocks[group.name]) for group in self._groups}
        self._slots = BlockPool(num_slots)
        self._holdings: dict[int, _Holding] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences that hold a slot."""
        return len(self._holdings)

    def num_free_blocks(self) -> dict[str, int]:
        """Free blocks per paged group."""
        return {name: pool.num_free for name, pool in self._pools.items()}

    def fits_alone(self, num_tokens: int) -> bool:
        """True when an empty cache could hold a sequence of `num_tokens` tokens."""
        return all(group.num_blocks_for(num_tokens) <= self._pools[group.name].num_usable for group in self._groups)

    def reserve(self, index: int, num_tokens: int, *, num_spare_blocks: int = 0) -> Reservation | None:
        """Give a new sequence a slot and blocks for `num_tokens` tokens.

        None when there is no room, or when fewer than `num_spare_blocks` blocks would stay free in some group.
        """
        assert index not in self._holdings, f"sequence {index} holds a slot already"
        needs = [(self._pools[group.name], group.num_blocks_for(num_tokens)) for group in self._groups]
        if self._slots.num_free == 0 or any(count + num_spare_blocks > pool.num_free for pool, count in needs):
            return None
        (slot,) = self._slots.take(1)
        self._holdings[index] = _Holding(slot, {group.name: [] for group in self._groups})
        runs = self.grow(index, num_tokens)
        assert runs is not None, f"sequence {index} found no blocks after they were counted"
        return Reservation(slot, runs)

    def grow(self, index: int, num_tokens: int) -> tuple[BlockRun, ...] | None:
        """Extend a sequence's blocks to hold `num_tokens` tokens; None when there is no room in some group."""
        held = self._holdings[index].block_ids
        missing = [(group.name, group.num_blocks_for(num_tokens) - len(held[group.name])) for group in self._groups]
        if any(count > self._pools[name].num_free for name, count in missing):
            return None
        runs = []
        for name, count in missing:
            if count > 0:
                block_ids = self._pools[name].take(count)
                runs.append(BlockRun(name, len(held[name]), np.array(block_ids, np.int32)))
                held[name].extend(block_ids)
        return tuple(runs)

    def trim(self, index: int, num_tokens: int) -> int:
        """Take back the blocks that `num_tokens` tokens don't need; returns how many."""
        held = self._holdings[index].block_ids
        num_taken = 0
        for group in self._groups:
            kept = group.num_blocks_for(num_tokens)
            spare = held[group.name][kept:]
            del held[group.name][kept:]
            self._pools[group.name].give_back(spare)
            num_taken += len(spare)
        return num_taken

    def release(self, index: int) -> None:
        """Take back the slot and all blocks of a sequence."""
        holding = self._holdings.pop(index)
        self._slots.give_back([holding.slot])
        for name, block_ids in holding.block_ids.items():
            self._pools[name].give_back(block_ids)

    def block_table(self, index: int, num_tokens: int) -> dict[str, npt.NDArray[np.int32]]:
        """Return, per paged group, the blocks of a sequence's first `num_tokens` tokens."""
        held = self._holdings[index].block_ids
        return {g.name: np.array(held[g.name][: g.num_blocks_for(num_tokens)], np.int32) for g in self._groups}

    def check_integrity(self) -> None:
        """Assert that every block and slot is either free or held by exactly one sequence."""
        self._slots.check([holding.slot for holding in self._holdings.values()])
        for name, pool in self._pools.items():
            pool.check([block for holding in self._holdings.values() for block in holding.block_ids[name]])
