"""A drafter that knows the answers: random weights accept almost nothing, so acceptance is made here."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deepinfer.runtime.slot_table import SlotTable
from deepinfer.speculative.drafter import Anchors, Drafts


@dataclass
class Accepted:
    """How many drafts were accepted, by the position of the anchor that they followed."""

    by_position: Counter[tuple[int, int]] = field(default_factory=Counter)  # (anchor position, accepted) -> passes

    def histogram(self, key: Callable[[int], object]) -> dict[object, Counter[int]]:
        """Counts of accepted lengths, grouped by `key(anchor position)`."""
        groups: dict[object, Counter[int]] = {}
        for (position, accepted), count in self.by_position.items():
            groups.setdefault(key(position), Counter())[accepted] += count
        return groups

    @property
    def committed_per_pass(self) -> float:
        """Mean number of tokens that a verification pass committed."""
        passes = sum(self.by_position.values())
        return sum((accepted + 1) * count for (_, accepted), count in self.by_position.items()) / passes


class OracleDrafter:
    """Drafts the true continuation with probability `hit_rate` at each place, else a token that is surely wrong."""

    def __init__(
        self, table: SlotTable, sequences: Sequence[Sequence[int]], *, hit_rate: float, vocab_size: int, log: Accepted
    ) -> None:
        """`sequences`: whole token ids, prompt and output, of everything that will run."""
        self._max_drafts = table.max_drafts
        self._sequences = [list(sequence) for sequence in sequences]
        self._hit_rate = hit_rate
        self._vocab_size = vocab_size
        self._log = log
        self._anchors: dict[tuple[int, int], int] = {}  # (slot, sequence) -> position of its last anchor

    @property
    def capturable(self) -> bool:
        """See `Drafter`: it looks tokens up on the host."""
        return False

    def draft(self, anchors: Anchors) -> Drafts:
        """See `Drafter`."""
        rows = []
        for slot, position in zip(anchors.slots.tolist(), anchors.positions.tolist(), strict=True):
            prefix = anchors.token_table[slot, : position + 1].tolist()
            rows.append(self._draft_behind(slot, prefix) if slot else [0] * self._max_drafts)
        token_ids = torch.tensor(rows, dtype=torch.int64)
        # Log-odds that say nothing, but differ: enough to make lengths vary.
        return Drafts(token_ids, (token_ids * 37 % 11).float() - 4.0)

    def _draft_behind(self, slot: int, prefix: list[int]) -> list[int]:
        number = next((n for n, known in enumerate(self._sequences) if known[: len(prefix)] == prefix), None)
        if number is None:  # it ran on behind its end, which only the host knows
            return [0] * self._max_drafts
        anchor, before = len(prefix) - 1, self._anchors.get((slot, number))
        if before is not None and before < anchor <= before + 1 + self._max_drafts:
            self._log.by_position[before, anchor - before - 1] += 1
        self._anchors[slot, number] = anchor
        known = self._sequences[number]
        return [self._tell(number, place, known) for place in range(anchor + 1, anchor + 1 + self._max_drafts)]

    def _tell(self, number: int, place: int, known: list[int]) -> int:
        truth = known[place] if place < len(known) else 0
        draw = random.Random(f"{number} {place} {self._hit_rate}").random()
        return truth if draw < self._hit_rate else (truth + 1) % self._vocab_size
