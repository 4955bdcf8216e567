"""Measures what a decode step costs on this machine, by number of sequences and drafts: before any request comes.

All ranks of a group measure at the same time, since steps are collectives. The sequences are made up; what they leave
in slots and caches is overwritten before anyone reads it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.platforms.platform import Stream
from deepinfer.protocol import SamplingParams
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.scheduler.step_plan import BlockGrant, DraftBudget, SlotAdmission, StepPlan
from deepinfer.speculative.cost_table import CostTable

_CONTEXT = 128  # tokens of a made-up sequence, if the context limit allows it
_NUM_DRAFTS = (0, 1, 3, 5)
_NUM_REPEATS = 3
_TOKEN_ID = 3


@dataclass(slots=True, frozen=True)
class Room:
    """What the measured steps may use: caches as on the rank itself."""

    groups: tuple[KVGroup, ...]
    num_blocks: dict[str, int]
    max_running: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that a made-up sequence begins with."""
        return max(1, min(_CONTEXT, self.max_model_len // 2))

    def blocks_per_slot(self, group: KVGroup) -> int:
        """Blocks for the beginning and all that the measured steps may add."""
        return group.num_blocks_for(self.max_model_len if self.max_model_len < 2 * _CONTEXT else 2 * _CONTEXT)

    @property
    def num_slots(self) -> int:
        """Sequences that fit, at most as many as may run."""
        paged = [group for group in self.groups if group.kind == "paged"]
        fitting = [(self.num_blocks[group.name] - 1) // self.blocks_per_slot(group) for group in paged]
        return max(1, min(self.max_running, *fitting))


def measure_costs(runner: ModelRunner, stream: Stream, room: Room, *, num_slots: int, max_drafts: int) -> CostTable:
    """Return the median seconds of steps with 1, 2, 4, .. `num_slots` sequences and 0 .. `max_drafts` drafts each.

    Those of steps that draft nothing are measured last: they leave nothing to verify.

    Both numbers are the same on all ranks of a group; `num_slots` is at most the room's.
    """
    sizes = tuple(_doubling(num_slots))
    lengths = tuple(sorted({count for count in _NUM_DRAFTS if count < max_drafts} | {max_drafts}))
    rows, plain = [], []
    for size in sizes:
        plans = _plans(room, size)
        _run(runner, stream, next(plans), 0)  # warms up, and leaves the first drafts
        rows.append(
            tuple(
                statistics.median(_run(runner, stream, next(plans), count) for _ in range(_NUM_REPEATS))
                for count in lengths
            )
        )
        plain.append(
            statistics.median(_run(runner, stream, next(plans), 0, is_drafting=False) for _ in range(_NUM_REPEATS))
        )
    return CostTable(num_sequences=sizes, num_drafts=lengths, seconds=tuple(rows), plain_seconds=tuple(plain))


def _doubling(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield largest


def _plans(room: Room, size: int) -> Iterator[StepPlan]:
    """Steps of `size` sequences in the slots from 1 on: the first admits them, all run them."""
    slots = np.arange(1, size + 1, dtype=np.int32)
    params = SamplingParams(max_tokens=room.max_model_len, seq_seed=0, ignore_eos=True)
    token_ids = np.full(room.num_tokens, _TOKEN_ID, np.int32)
    yield StepPlan(
        0,
        admissions=tuple(SlotAdmission(int(slot), token_ids, room.num_tokens - 1, params) for slot in slots),
        grants=tuple(grant for group in room.groups if group.kind == "paged" for grant in _grants(room, group, size)),
        decode_slots=slots,
    )
    while True:
        yield StepPlan(0, decode_slots=slots)


def _grants(room: Room, group: KVGroup, size: int) -> Iterator[BlockGrant]:
    count = min(room.blocks_per_slot(group), room.num_blocks[group.name] - 1)
    for place in range(size):
        yield BlockGrant(
            place + 1, group.name, 0, np.arange(1 + place * count, 1 + (place + 1) * count, dtype=np.int32)
        )


def _run(runner: ModelRunner, stream: Stream, plan: StepPlan, num_drafts: int, *, is_drafting: bool = True) -> float:
    plan.draft_budget, plan.is_drafting = DraftBudget(num_drafts), is_drafting
    start = stream.submit(lambda: runner.start_step(plan))
    finish = stream.submit(lambda: runner.finish_step(plan, None))
    finish.result()
    return finish.end_seconds - start.begin_seconds
