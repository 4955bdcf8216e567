"""Cache bookkeeping: random sequences of calls keep "free + held = all", and a refused call takes nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from deepinfer.kv_cache.cache_manager import CacheManager
from deepinfer.kv_cache.kv_groups import KVGroup

GROUPS = (
    KVGroup("main", "paged", 4, 1, True, "a"),
    KVGroup("half", "paged", 10, 1, True, "b"),
    KVGroup("window", "sequence", 4, 1, False, "c"),
)


def blocks_of(num_tokens: int) -> dict[str, int]:
    return {group.name: group.num_blocks_for(num_tokens) for group in GROUPS if group.kind == "paged"}


class CacheMachine(RuleBasedStateMachine):
    """The model: what each sequence holds, rebuilt from what the calls returned."""

    sequences = Bundle("sequences")

    @initialize(
        main=st.integers(1, 12),
        half=st.integers(1, 8),
        slots=st.integers(1, 6),
    )
    def start(self, main: int, half: int, slots: int) -> None:
        self.usable = {"main": main - 1, "half": half - 1}
        self.num_slots = slots - 1
        self.cache = CacheManager(GROUPS, num_blocks={"main": main, "half": half}, num_slots=slots)
        self.tables: dict[int, dict[str, list[int]]] = {}
        self.slots: dict[int, int] = {}
        self.next_index = 0

    def free(self) -> dict[str, int]:
        return {
            name: count - sum(len(table[name]) for table in self.tables.values()) for name, count in self.usable.items()
        }

    def extend(self, index: int, runs: tuple) -> None:
        for run in runs:
            table = self.tables[index][run.group]
            assert run.first_index == len(table)
            table.extend(run.block_ids.tolist())

    @rule(target=sequences, num_tokens=st.integers(1, 40), spare=st.integers(0, 3))
    def reserve(self, num_tokens: int, spare: int) -> int:
        index = self.next_index
        self.next_index += 1
        needed, free = blocks_of(num_tokens), self.free()
        fits = len(self.slots) < self.num_slots and all(needed[name] + spare <= free[name] for name in free)
        reservation = self.cache.reserve(index, num_tokens, num_spare_blocks=spare)
        assert (reservation is not None) == fits
        assert self.cache.fits_alone(num_tokens) == all(needed[name] <= self.usable[name] for name in needed)
        if reservation is not None:
            self.slots[index] = reservation.slot
            self.tables[index] = {"main": [], "half": []}
            self.extend(index, reservation.runs)
        return index

    @rule(index=sequences, num_tokens=st.integers(1, 60))
    def grow(self, index: int, num_tokens: int) -> None:
        if index not in self.tables:
            return
        table, free = self.tables[index], self.free()
        missing = {name: max(0, count - len(table[name])) for name, count in blocks_of(num_tokens).items()}
        runs = self.cache.grow(index, num_tokens)
        assert (runs is not None) == all(missing[name] <= free[name] for name in free)
        if runs is not None:
            self.extend(index, runs)
            assert all(len(table[name]) >= count for name, count in blocks_of(num_tokens).items())

    @rule(index=sequences, num_tokens=st.integers(1, 40))
    def trim(self, index: int, num_tokens: int) -> None:
        if index not in self.tables:
            return
        table = self.tables[index]
        spare = sum(max(0, len(table[name]) - count) for name, count in blocks_of(num_tokens).items())
        assert self.cache.trim(index, num_tokens) == spare
        for name, count in blocks_of(num_tokens).items():
            del table[name][count:]

    @rule(index=consumes(sequences))
    def release(self, index: int) -> None:
        if index in self.tables:
            self.cache.release(index)
            del self.tables[index], self.slots[index]

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_free_blocks() == self.free()
        assert self.cache.num_sequences == len(self.tables)
        assert len(set(self.slots.values()) | {0}) == len(self.slots) + 1
        for name in self.usable:
            held = [block for table in self.tables.values() for block in table[name]]
            assert len(set(held) | {0}) == len(held) + 1
        for index, table in self.tables.items():
            shown = self.cache.block_table(index, 20)
            assert {name: blocks.tolist() for name, blocks in shown.items()} == {
                name: table[name][: blocks_of(20)[name]] for name in table
            }


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_integrity_check_sees_a_block_held_twice() -> None:
    cache = CacheManager(GROUPS, num_blocks={"main": 5, "half": 5}, num_slots=3)
    cache.reserve(1, 4)
    cache.reserve(2, 4)
    cache._holdings[2].block_ids["main"][0] = cache._holdings[1].block_ids["main"][0]
    with pytest.raises(AssertionError, match="twice"):
        cache.check_integrity()


def test_a_block_is_given_back_once() -> None:
    cache = CacheManager(GROUPS, num_blocks={"main": 5, "half": 5}, num_slots=3)
    cache.reserve(1, 4)
    cache._pools["main"].give_back([1])
    with pytest.raises(AssertionError, match="not held"):
        cache.release(1)
