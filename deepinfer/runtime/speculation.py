"""The decode rows of a step: how many drafts each slot verifies, what is committed, and the drafts for the next step.

Runs on the device thread, around the model's forward pass, and reads nothing back. Without a drafter it is plain
decoding: one row a slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepinfer.runtime.slot_table import SlotTable
from deepinfer.sampling.sampler import OwnerLogprobs, rank_owners
from deepinfer.scheduler.step_plan import DraftBudget
from deepinfer.speculative.drafter import Drafter, Drafts
from deepinfer.speculative.verifier import Verifier, VerifyRows
from deepinfer.speculative.verify_planner import share_budget


@dataclass(slots=True, frozen=True)
class Committed:
    """What the S decode sequences of a step got: see `Verified`.

    `num_drafted` [S] int64: verified drafts; -1: the sequence had no rows.
    """

    token_ids: torch.Tensor
    counts: torch.Tensor
    failed: torch.Tensor
    fell_back: torch.Tensor | None
    num_drafted: torch.Tensor


class Speculation:
    """Verifies and drafts for the slots of one table."""

    def __init__(self, table: SlotTable, *, drafter: Drafter | None, verifier: Verifier) -> None:
        """`drafter` None: nothing is ever drafted."""
        self._table = table
        self._drafter = drafter
        self._verifier = verifier

    @property
    def capturable(self) -> bool:
        """Whether a graph may hold `draft`."""
        return self._drafter is None or self._drafter.capturable

    @property
    def is_drafting(self) -> bool:
        """Whether `draft` does anything."""
        return self._drafter is not None

    def num_drafts(self, slots: torch.Tensor, budget: DraftBudget | None) -> torch.Tensor:
        """Return int64 [S]: drafts that each of `slots` [S] runs beside its anchor; -1 where a sequence has ended."""
        room = self._table.read(slots).room
        return room if budget is None else share_budget(self._table.confidence[slots], room, budget)

    def max_rows(self, num_slots: int, budget: DraftBudget | None) -> int:
        """Return how many rows `num_slots` slots have at most."""
        drafts = num_slots * (self._table.max_drafts if budget is None else budget.num_drafts)
        return num_slots + (drafts if budget is None or budget.total is None else min(drafts, budget.total))

    def commit(self, logits: torch.Tensor, rows: VerifyRows, slots: torch.Tensor) -> Committed:
        """Verify the rows by their `logits` [R, V] and commit to `slots` [S]."""
        verified = self._verifier.verify(logits, rows, self._table.sampling)
        self._table.commit(slots, verified.token_ids, verified.counts)
        return Committed(verified.token_ids, verified.counts, verified.failed, verified.fell_back, rows.num_drafts)

    def draft(self, slots: torch.Tensor, owners: tuple[int, ...] = ()) -> Drafts | None:
        """Draft behind what is committed in `slots` [S]; None: nothing drafts. Scores are left in the table alone.

        A rank without any joins with slot 0, which is inert. `owners`: the slots as far as the host tells them.
        """
        if self._drafter is None:
            return None
        drafts = self._drafter.draft(self._table.anchors(slots, owners))
        self._table.put_drafts(slots, drafts)
        return replace(drafts, scores=None)

    def logprobs(self, logits: torch.Tensor, rows: VerifyRows, committed: Committed) -> OwnerLogprobs | None:
        """Return the log-probabilities of each sequence's tokens, where asked for."""
        return rank_owners(logits, committed.token_ids, rows.rows.by_owner, rows.rows, self._table.sampling)
