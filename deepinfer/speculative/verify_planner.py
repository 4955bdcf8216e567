"""How many drafts a step verifies: a budget from measured costs and old confidences, shared out by present ones.

The budget is chosen on the host before the step's drafts are known there, from log-odds that are at least two passes
old: it can't depend on the values of the drafts that it admits, which is what keeps rejection sampling unbiased (the
DSpark paper, 5.2). The device then ranks the present drafts within the budget. Under shared noise nothing of this can
change the output at all. Whether a step drafts at all follows from earlier outcomes, see `DraftAccount`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepinfer.platforms.transfer import to_device
from deepinfer.scheduler.step_plan import DraftBudget, Float32Array, StepOutput, StepPlan
from deepinfer.speculative.confidence import Calibrator, survival
from deepinfer.speculative.cost_table import CostTable
from deepinfer.speculative.draft_account import DraftAccount

_MIN_LAG = 2  # passes between the log-odds that a budget is made from and the drafts that it admits
_MIN_GAIN = 1.02  # over the best fixed length, before lengths vary: what it brings must exceed its bookkeeping


def best_budget(chances: np.ndarray, costs: CostTable, temperatures: tuple[float, ...]) -> DraftBudget:
    """Return the budget with the most committed tokens per second, for `chances` [R, K] of survival.

    Either a total, if that promises more than the best fixed length by the least gain, or that fixed length. Ties go
    to fewer drafts.
    """
    num_sequences, num_drafts = chances.shape

    def rate(total: int, survivors: float) -> float:
        return (num_sequences + survivors) / costs.step_seconds(num_sequences, total / num_sequences)

    by_length = chances.sum(0).cumsum()
    fixed = [rate(0, 0.0)] + [rate(num_sequences * (k + 1), by_length[k]) for k in range(num_drafts)]
    best_fixed = int(np.argmax(fixed))
    likely = np.sort(chances, axis=None)[::-1].cumsum()
    shared = [rate(0, 0.0)] + [rate(total + 1, likely[total]) for total in range(num_sequences * num_drafts)]
    best_total = int(np.argmax(shared))
    if shared[best_total] > _MIN_GAIN * fixed[best_fixed]:
        return DraftBudget(num_drafts, best_total, temperatures)
    return DraftBudget(best_fixed)


@dataclass(slots=True)
class _Slot:
    """One sequence's passes. `log_odds` [K] by pass: those of the drafts that the pass verifies; pass 0 has none."""

    num_planned: int = 0
    num_read: int = 0
    log_odds: dict[int, Float32Array] = field(default_factory=dict)


class VerifyPlanner:
    """Follows a rank's steps: learns log-odds and outcomes as they are read, and gives each new step its budget.

    A slot without old enough log-odds counts as sure. Limits of sequences are the device's to know; near them the
    budget is a little too large.
    """

    def __init__(self, costs: CostTable, max_drafts: int) -> None:
        """`costs` were measured with up to `max_drafts` drafts."""
        self._costs = costs
        self._max_drafts = max_drafts
        self._calibrator = Calibrator(max_drafts)
        self._account = DraftAccount(costs)
        self._left_drafts = True  # the step planned last
        self._slots: dict[int, _Slot] = {}

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The calibration in use."""
        return self._calibrator.temperatures

    def wants_drafts(self, plan: StepPlan) -> bool:
        """Return whether the step of `plan` should draft for the next one."""
        return len(plan.decode_slots) > 0 and self._account.wants_drafts

    def budget(self, plan: StepPlan) -> DraftBudget | None:
        """Return the budget of a step about to be launched; None when it decodes nothing. Once for each plan.

        It is known whether the step drafts. One that does not verifies nothing either.
        """
        has_drafts, self._left_drafts = self._left_drafts and plan.is_drafting, plan.is_drafting
        for admission in plan.admissions:
            self._slots[admission.slot] = _Slot()
        slots = plan.decode_slots.tolist()
        if not slots:
            return None
        chances = np.ones((len(slots), self._max_drafts))
        for place, slot in enumerate(slots):
            state = self._slots[slot]
            known = state.log_odds.pop(state.num_planned - _MIN_LAG, None)
            if known is not None:
                chances[place] = survival(known, self.temperatures)
            state.num_planned += 1
        if not plan.is_drafting:
            self._account.rest(len(slots))
        if not has_drafts:
            return DraftBudget(0)
        return best_budget(chances, self._costs, self.temperatures)

    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        """Take in a step's results: outcomes of the drafts that it verified, log-odds of those for the next pass."""
        slots = plan.decode_slots.tolist()
        results = output.slots[len(output.slots) - len(slots) :]
        if slots and plan.is_drafting:
            self._account.add(
                len(slots),
                num_drafted=sum(result.num_drafted for result in results),
                num_accepted=sum(result.num_accepted for result in results),
            )
        for place, (slot, result) in enumerate(zip(slots, results, strict=True)):
            state = self._slots[slot]
            verified = state.log_odds.get(state.num_read)
            if verified is not None and result.failure is None:
                self._calibrator.add(verified, num_drafted=result.num_drafted, num_accepted=result.num_accepted)
            state.num_read += 1
            if output.confidence is not None:
                state.log_odds[state.num_read] = output.confidence[place]


def share_budget(confidence: Tensor, room: Tensor, budget: DraftBudget) -> Tensor:
    """Return int64 [n]: how many drafts each of n slots verifies; -1 where `room` says that the slot has no rows.

    `confidence` [n, K] float32 log-odds of the present drafts; `room` [n] int64: most drafts of a slot. Without a total
    each slot gets `num_drafts` at most. With one, the drafts that are most likely to survive are taken, that many in
    all: survival falls along a sequence, so they are a prefix. Ties: larger survival, then the earlier draft, then the
    earlier slot; never anything that depends on a draft's own value.
    """
    if budget.total is None:
        return torch.clamp_max(room, budget.num_drafts)
    num_slots, num_drafts = confidence.shape
    temperatures = np.array(budget.temperatures or (1.0,) * num_drafts, np.float32)
    chances = torch.sigmoid(confidence / to_device(temperatures, confidence.device)).cumprod(1)
    steps = torch.arange(num_drafts, device=confidence.device)
    chances = chances.masked_fill(steps >= room[:, None], -1.0)
    order = torch.sort(chances.t().flatten(), descending=True, stable=True)
    taken = (order.values[: budget.total] >= 0).to(torch.int64)
    counts = torch.zeros_like(room).scatter_add_(0, order.indices[: budget.total] % num_slots, taken)
    return torch.where(room < 0, -1, counts)
