"""How many drafts a step verifies."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.scheduler.step_plan import DraftBudget


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
    temperatures = torch.tensor(budget.temperatures or (1.0,) * num_drafts, device=confidence.device)
    survival = torch.sigmoid(confidence / temperatures).cumprod(1)
    steps = torch.arange(num_drafts, device=confidence.device)
    survival = survival.masked_fill(steps >= room[:, None], -1.0)
    order = torch.sort(survival.t().flatten(), descending=True, stable=True)
    taken = order.indices[: budget.total][order.values[: budget.total] >= 0]
    counts = torch.bincount(taken % num_slots, minlength=num_slots)
    return torch.where(room < 0, -1, counts)
