"""A model of integers: what a row answers depends on every earlier token of its sequence, read back from the caches.

Wrong blocks, slots, positions, inputs or hand-overs change the answers; batching, chunking and placement do not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from deepinfer.kernels.ops import ExpertRows
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.models.model_spec import ForwardInputs, ForwardOutput, KVPart

VOCAB_SIZE = 64
NUM_EXPERTS = 8
RING = 8
_MODULUS = 2**31 - 1


@dataclass
class FakeCaches:
    """`records` [blocks, tokens_per_block] and `rings` [slots, RING], int64."""

    records: torch.Tensor
    rings: torch.Tensor


def fake_groups(tokens_per_block: int) -> tuple[KVGroup, ...]:
    """One paged group and one with a ring per sequence."""
    return (
        KVGroup("global", "paged", tokens_per_block, 8 * tokens_per_block, True, "fake 8"),
        KVGroup("window", "sequence", RING, 8 * RING, False, f"fake ring {RING}"),
    )


class FakeModel:
    """See `model_spec.Model`. Each forward takes at least `step_seconds`; rows of token `nan_token` give NaN."""

    capturable = True

    def __init__(self, *, step_seconds: float = 0.0, nan_token: int | None = None) -> None:
        self.step_seconds = step_seconds
        self.nan_token = nan_token
        self.row_counts: list[int] = []

    def allocate_caches(self, *, num_blocks: dict[str, int], num_slots: int, tokens_per_block: int) -> FakeCaches:
        return FakeCaches(
            records=torch.zeros(num_blocks["global"], tokens_per_block, dtype=torch.int64),
            rings=torch.zeros(num_slots, RING, dtype=torch.int64),
        )

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        end = time.monotonic() + self.step_seconds
        self.row_counts.append(len(inputs.token_ids))
        states = self._states(inputs)
        rows = torch.stack([states % 4096, states // 4096 % 4096], dim=1).to(torch.float32)
        expert_ids = torch.stack([states % NUM_EXPERTS, states // 11 % NUM_EXPERTS], dim=1)
        expert_ids[inputs.is_padding] = -1
        mixed = states + _through_experts(inputs, rows, expert_ids)
        wanted = slice(None) if inputs.logit_rows is None else inputs.logit_rows
        chosen = mixed[wanted]
        tokens = torch.arange(VOCAB_SIZE)
        logits = ((chosen[:, None] % 99991 * 7919 + (tokens + 3) ** 3 * 104729) % 9973).to(torch.float32) / 997.0
        if self.nan_token is not None:
            logits[inputs.token_ids[wanted] == self.nan_token] = torch.nan
        time.sleep(max(0.0, end - time.monotonic()))
        return ForwardOutput(logits)

    def kv_bytes(self, caches: FakeCaches, num_tokens: int) -> int:
        return 8 * (num_tokens + RING)

    def export_kv(
        self,
        caches: FakeCaches,
        *,
        slot: int,
        block_ids: dict[str, torch.Tensor],
        num_tokens: int,
        into: torch.Tensor | None = None,
    ) -> tuple[KVPart, ...]:
        records = caches.records[block_ids["global"]].flatten()[:num_tokens].contiguous().view(torch.uint8)
        ring = caches.rings[slot].clone().view(torch.uint8)
        if into is not None:
            end = len(records) + len(ring)
            into[:end] = torch.cat((records, ring))
            records, ring = into[: len(records)], into[len(records) : end]
        return (KVPart("global", 0, num_tokens, records), KVPart("window", max(0, num_tokens - RING), RING, ring))

    def import_kv(
        self,
        caches: FakeCaches,
        *,
        slot: int,
        block_ids: dict[str, torch.Tensor],
        num_tokens: int,
        parts: tuple[KVPart, ...],
    ) -> None:
        records, ring = (part.data.clone().view(torch.int64) for part in parts)
        positions = torch.arange(num_tokens)
        size = caches.records.shape[1]
        caches.records[block_ids["global"][positions // size], positions % size] = records
        caches.rings[slot] = ring

    def _states(self, inputs: ForwardInputs) -> torch.Tensor:
        """Store each row's record; return [T]: a hash of all tokens up to the row, from the caches alone."""
        caches: FakeCaches = inputs.caches
        size = caches.records.shape[1]
        sequence, positions = inputs.row_sequence, inputs.positions
        tables = inputs.block_tables["global"]
        caches.records[tables[sequence, positions // size], positions % size] = (
            inputs.token_ids * 131 + positions * 17 + 5
        )
        history = caches.records[tables].view(len(tables), -1)
        sums = (history * (torch.arange(history.shape[1]) + 1)).cumsum(dim=1)
        # The look-back of n-gram models: the token two places before, from the token table.
        slots = inputs.sequence_slots[sequence]
        look_back = inputs.token_table[slots, (positions - 2).clamp(min=0)].to(torch.int64)
        states = (sums[sequence, positions] + look_back * 1009) % _MODULUS
        return self._mix_previous(inputs, states, slots)

    def _mix_previous(self, inputs: ForwardInputs, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Add each row's predecessor: in this step's rows, or in the ring of its slot; then write the rings."""
        rings, positions = inputs.caches.rings, inputs.positions
        is_first = torch.arange(len(states)) == inputs.sequence_starts[inputs.row_sequence]
        before = torch.where(is_first, rings[slots, (positions - 1) % RING], states.roll(1))
        before = torch.where(positions == 0, 0, before)
        last = inputs.positions[inputs.sequence_starts[1:] - 1][inputs.row_sequence]
        kept = positions > last - RING
        rings[slots[kept], positions[kept] % RING] = states[kept]
        return (states + 31 * before) % _MODULUS


def _through_experts(inputs: ForwardInputs, rows: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its experts' numbers, wherever they are; exact in float32."""
    dispatcher = inputs.dispatcher
    sent = dispatcher.dispatch(rows, expert_ids, torch.ones(expert_ids.shape, dtype=torch.float32))
    first = dispatcher.rank * NUM_EXPERTS // dispatcher.num_ranks
    values = sent.rows.unsqueeze(1) * (sent.expert_ids.unsqueeze(2) + first + 1)
    places = torch.arange(sent.expert_ids.numel()).view_as(sent.expert_ids)
    places = torch.where(sent.expert_ids < 0, -1, places)
    returned = dispatcher.combine(ExpertRows(values.flatten(0, 1), places), sent)
    combined = torch.cat((returned.values, torch.zeros(1, rows.shape[1])))[returned.places]  # -1 is the last row
    return combined.sum(dim=(1, 2)).to(torch.int64)
