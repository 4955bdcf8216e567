"""When drafting stops, how long it rests, and when it goes on: a rank that is played through its account."""

from __future__ import annotations

import pytest

from deepinfer.speculative.cost_table import CostTable
from deepinfer.speculative.draft_account import DraftAccount

DRAFTING, VERIFYING = 0.25, 0.05  # seconds on top of a plain step of 1 s; the latter for each draft of a sequence
COSTS = CostTable((1, 8), (0, 5), ((1 + DRAFTING, 1 + DRAFTING + 5 * VERIFYING),) * 2, (1.0, 1.0))


def _play(account: DraftAccount, accepted: list[int], *, num_sequences: int = 8) -> tuple[list[bool], float, int]:
    """Run a step for each entry of `accepted`, the accepted drafts of each sequence where five are verified.

    Return which steps drafted, the seconds that all took, and the tokens of each sequence.
    """
    drafted: list[bool] = []
    seconds, num_tokens = 0.0, 0
    for count in accepted:
        wants, has_drafts = account.wants_drafts, bool(drafted) and drafted[-1]
        drafted.append(wants)
        if not wants:
            account.rest(num_sequences)
            seconds, num_tokens = seconds + COSTS.plain_step_seconds(num_sequences), num_tokens + 1
            continue
        num_drafted, num_accepted = (5, count) if has_drafts else (0, 0)
        seconds += COSTS.step_seconds(num_sequences, num_drafted)
        num_tokens += 1 + num_accepted
        account.add(num_sequences, num_drafted=num_sequences * num_drafted, num_accepted=num_sequences * num_accepted)
    return drafted, seconds, num_tokens


@pytest.mark.parametrize("num_sequences", [1, 2, 8, 20])
def test_where_nothing_is_accepted_drafting_takes_little_of_the_time(num_sequences: int) -> None:
    """P28: as fast as without drafts, to 2 %, the first trial included; and trials go on."""
    drafted, seconds, num_tokens = _play(DraftAccount(COSTS), [0] * 2000, num_sequences=num_sequences)
    assert num_tokens * COSTS.plain_step_seconds(num_sequences) / seconds >= 0.98
    first, late = drafted[:200], drafted[1000:]
    assert first[0]
    assert not all(first)
    assert any(late)


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_what_pays_is_drafted_in_every_step(num_sequences: int) -> None:
    drafted, _, _ = _play(DraftAccount(COSTS), [1] * 500, num_sequences=num_sequences)
    assert all(drafted)


def test_one_bad_stretch_among_good_ones_ends_nothing() -> None:
    drafted, _, _ = _play(DraftAccount(COSTS), ([3] * 12 + [0] * 4) * 20)
    assert all(drafted)


def test_drafting_goes_on_when_text_becomes_predictable() -> None:
    account = DraftAccount(COSTS)
    before, _, _ = _play(account, [0] * 300)
    assert not before[-1]
    after, _, _ = _play(account, [3] * 1000)
    assert all(after[-500:])


def test_dearer_drafts_rest_longer() -> None:
    dear = CostTable((1, 8), (0, 5), ((2.0, 4.0),) * 2, (1.0, 1.0))
    rests = []
    for costs in (COSTS, dear):
        account = DraftAccount(costs)
        while account.wants_drafts:
            account.add(8, num_drafted=40, num_accepted=0)
        length = 0
        while not account.wants_drafts:
            account.rest(8)
            length += 1
        rests.append(length)
    assert rests[1] == pytest.approx(rests[0] * 3.0 / (DRAFTING + 5 * VERIFYING), rel=0.01)


def test_a_trial_that_others_need_goes_on_but_is_not_wanted_here() -> None:
    """The rest of a rank runs only in steps in which nobody drafts; drafts that pay here after all end it."""
    account = DraftAccount(COSTS)
    for _ in range(50):
        account.add(8, num_drafted=40, num_accepted=0)
    assert not account.wants_drafts
    for _ in range(4):
        account.add(8, num_drafted=40, num_accepted=24)
    assert account.wants_drafts
