"""Budgets against brute force, and which drafts a budget admits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from deepinfer.protocol import SamplingParams
from deepinfer.scheduler.step_plan import DraftBudget, SlotAdmission, SlotOutput, StepOutput, StepPlan
from deepinfer.speculative.confidence import survival
from deepinfer.speculative.cost_table import CostTable
from deepinfer.speculative.verify_planner import VerifyPlanner, best_budget, share_budget

ONES = (1.0, 1.0, 1.0)


def _costs(slope: float, *, base: float = 1.0) -> CostTable:
    """`base` plus `slope` for each row beside the anchors."""
    sizes, lengths = (1, 2, 3, 4), (0, 1, 2, 3)
    return CostTable(sizes, lengths, tuple(tuple(base + slope * r * k for k in lengths) for r in sizes), (base,) * 4)


def _rate(lengths: tuple[int, ...], chances: np.ndarray, costs: CostTable) -> float:
    count = len(lengths)
    survivors = sum(chances[r, :length].sum() for r, length in enumerate(lengths))
    return (count + survivors) / costs.step_seconds(count, sum(lengths) / count)


@pytest.mark.parametrize("seed", range(12))
def test_a_budget_is_as_good_as_the_best_of_all_lengths(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    count = int(numbers.integers(1, 5))
    log_odds = numbers.normal(0.5, 2.0, (count, 3)).astype(np.float32)
    chances = survival(log_odds, ONES)
    costs = _costs(float(numbers.uniform(0.02, 0.6)))
    budget = best_budget(chances, costs, ONES)
    lengths = share_budget(torch.from_numpy(log_odds), torch.full((count,), 3), budget).tolist()
    best = max(_rate(choice, chances, costs) for choice in itertools.product(range(4), repeat=count))
    fixed = max(_rate((length,) * count, chances, costs) for length in range(4))
    assert _rate(tuple(lengths), chances, costs) >= max(fixed, best / 1.02) - 1e-9


def test_free_rows_are_all_taken_and_dear_ones_not_at_all() -> None:
    chances = survival(np.array([[2.0, 2.0, 2.0], [-3.0, 1.0, 1.0]]), ONES)
    assert best_budget(chances, _costs(0.0), ONES) == DraftBudget(3)
    assert best_budget(chances, _costs(5.0), ONES) == DraftBudget(0)


def test_lengths_vary_only_where_it_pays() -> None:
    alike = survival(np.array([[1.0, 1.0, 1.0]] * 2), ONES)
    assert best_budget(alike, _costs(0.2), ONES).total is None
    unlike = survival(np.array([[4.0, 4.0, 4.0], [-4.0, -4.0, -4.0]]), ONES)
    assert best_budget(unlike, _costs(0.3), ONES).total == 3


def test_the_likeliest_drafts_are_admitted_as_prefixes() -> None:
    confidence = torch.tensor([[3.0, -2.0, 9.0], [1.0, 1.0, 1.0], [0.0, 5.0, 5.0]])
    room = torch.tensor([3, 3, 3])
    taken = [share_budget(confidence, room, DraftBudget(3, total)).tolist() for total in range(10)]
    # Survival: .95 .11 .11, .73 .53 .39, .50 .497 .493
    assert taken[:6] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 2, 0], [1, 2, 1], [1, 2, 2]]
    assert taken[9] == [3, 3, 3]
    assert share_budget(confidence, room, DraftBudget(2)).tolist() == [2, 2, 2]


def test_ties_go_to_earlier_drafts_then_to_earlier_slots() -> None:
    sure = torch.full((3, 3), 100.0)  # survival is 1.0 everywhere
    room = torch.tensor([3, 3, 3])
    taken = [share_budget(sure, room, DraftBudget(3, total)).tolist() for total in (1, 2, 3, 4)]
    assert taken == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]]


def test_room_bounds_every_slot() -> None:
    sure = torch.full((4, 3), 5.0)
    room = torch.tensor([-1, 0, 2, 3])
    assert share_budget(sure, room, DraftBudget(3, 12)).tolist() == [-1, 0, 2, 3]
    assert share_budget(sure, room, DraftBudget(1)).tolist() == [-1, 0, 1, 1]


def test_temperatures_change_the_ranking() -> None:
    confidence = torch.tensor([[1.0, 8.0], [1.2, 0.5]])
    room = torch.tensor([2, 2])
    assert share_budget(confidence, room, DraftBudget(2, 3)).tolist() == [2, 1]
    assert share_budget(confidence, room, DraftBudget(2, 3, (1.0, 100.0))).tolist() == [1, 2]


def _step(step_id: int, *, admit: bool = False) -> StepPlan:
    admissions = (SlotAdmission(1, np.array([5, 6], np.int32), 1, SamplingParams(seq_seed=0)),) if admit else ()
    return StepPlan(step_id, admissions=admissions, decode_slots=np.array([1], np.int32), max_rows_per_slot=4)


def _output(plan: StepPlan, log_odds: float, *, drafted: int = 3, accepted: int = 0) -> StepOutput:
    tokens = np.zeros(accepted + 1, np.int32)
    result = SlotOutput(1, tokens, num_drafted=drafted, num_accepted=accepted)
    return StepOutput(plan.step_id, (result,), confidence=np.full((1, 3), log_odds, np.float32))


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_budget_never_sees_the_log_odds_of_its_own_or_the_last_drafts(steps_ahead: int) -> None:
    """Log-odds that are read turn bad at pass 3's drafts; budgets follow from pass 5 on, read late or at once."""
    planner = VerifyPlanner(_costs(0.1), 3)
    waiting: list[StepPlan] = []
    budgets = []
    for number in range(8):
        plan = _step(10 + number, admit=number == 0)
        budgets.append(planner.budget(plan))
        waiting.append(plan)
        while len(waiting) > steps_ahead:
            oldest = waiting.pop(0)
            # The output of pass n has the log-odds of the drafts that pass n + 1 verifies.
            planner.observe(oldest, _output(oldest, 9.0 if oldest.step_id < 12 else -9.0))
    assert [budget.num_drafts for budget in budgets] == [3, 3, 3, 3, 3, 0, 0, 0]


def test_a_new_sequence_in_a_slot_counts_as_sure() -> None:
    planner = VerifyPlanner(_costs(0.1), 3)
    for number in range(5):
        plan = _step(number, admit=number == 0)
        budget = planner.budget(plan)
        planner.observe(plan, _output(plan, -9.0))
    assert budget == DraftBudget(0)
    assert planner.budget(_step(5, admit=True)) == DraftBudget(3)


def test_outcomes_calibrate() -> None:
    """Log-odds of 2 (0.88) whose drafts survive one time in two: temperatures rise."""
    planner = VerifyPlanner(_costs(0.0), 3)
    for number in range(600):
        plan = _step(number, admit=number == 0)
        planner.budget(plan)
        planner.observe(plan, _output(plan, 2.0, accepted=3 if number % 2 else 0))
    assert planner.temperatures[0] == pytest.approx(4.0)  # the grid's end: sigmoid(2 / 4) = 0.62
    assert planner.temperatures[1] == pytest.approx(1.42, rel=0.05)  # 0.62 * sigmoid(2 / 1.42) = 0.5


def test_a_step_without_decode_slots_has_no_budget() -> None:
    assert VerifyPlanner(_costs(0.1), 3).budget(StepPlan(0)) is None


def _play(planner: VerifyPlanner, count: int, *, accepted: int, first_id: int = 0) -> list[tuple[bool, int]]:
    """Run `count` steps of one sequence, read at once; return whether each drafted, and the drafts that it verified."""
    seen = []
    has_drafts = False
    for number in range(first_id, first_id + count):
        plan = _step(number, admit=number == 0)
        plan.is_drafting = planner.wants_drafts(plan)
        budget = planner.budget(plan)
        assert budget is not None
        drafted = budget.num_drafts if has_drafts else 0
        output = _output(plan, 9.0, drafted=drafted, accepted=min(drafted, accepted))
        if not plan.is_drafting:
            output.confidence = None
        planner.observe(plan, output)
        seen.append((plan.is_drafting, budget.num_drafts))
        has_drafts = plan.is_drafting
    return seen


def test_a_stretch_of_rejections_ends_drafting_until_a_later_trial() -> None:
    """Log-odds that promise everything don't help. A step that drafts nothing verifies nothing, nor does the next."""
    planner = VerifyPlanner(_costs(0.1), 3)
    seen = _play(planner, 2000, accepted=0)
    resting = [place for place, (is_drafting, _) in enumerate(seen) if not is_drafting]
    assert len(resting) > 0.9 * len(seen)
    assert all(seen[place][1] == 0 for place in resting)
    resumed = [place for place in range(1, 2000) if seen[place][0] and not seen[place - 1][0]]
    assert resumed
    assert all(seen[place] == (True, 0) for place in resumed)
    assert any(count == 3 for _, count in seen[resumed[0] :])
    assert all(is_drafting for is_drafting, _ in _play(planner, 3000, accepted=3, first_id=2000)[-1000:])


def test_a_rank_without_sequences_wants_no_drafts() -> None:
    planner = VerifyPlanner(_costs(0.1), 3)
    assert planner.wants_drafts(_step(0, admit=True))
    assert not planner.wants_drafts(StepPlan(1))
