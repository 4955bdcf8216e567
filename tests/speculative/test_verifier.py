"""Both rules are lossless: committed tokens follow the target's distribution, however drafts were made and cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from verify_case import NUM_SLOTS, VOCAB, Case, chi_square, distribution, run

from deepinfer.protocol import SamplingParams

TARGET = torch.tensor([2.0, 1.5, 1.0, 0.6, 0.3, 0.0, -0.3, -0.8, -1.2, -2.0])
NEAR = TARGET + torch.tensor([0.3, -0.4, 0.2, 0.5, -0.1, 0.4, -0.5, 0.1, 0.2, -0.3])
FAR = TARGET.flip(0)
MAX_CHI_SQUARE = 33.7  # 9 degrees of freedom: one run in ten thousand is above
COUNT = NUM_SLOTS - 1


def _params(**changes: float) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seq_seed": 0} | changes)


def _all(num_drafts: int) -> Tensor:
    return torch.full((COUNT,), num_drafts)


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
@pytest.mark.parametrize(
    ("proposed", "changes"),
    [(NEAR, {}), (FAR, {}), (TARGET, {}), (NEAR, {"temperature": 0.6}), (FAR, {"top_p": 0.8}), (NEAR, {"top_k": 4})],
)
def test_every_committed_token_follows_the_target(rule: str, proposed: Tensor, changes: dict[str, float]) -> None:
    case = Case(TARGET, proposed, _params(**changes))
    verified = run(case, rule, _all(5))
    expected = distribution(case)
    for place in range(4):
        there = (verified.counts - 1) >= place
        assert chi_square(verified.token_ids[there, place], expected) < MAX_CHI_SQUARE, place
    # The token behind an accepted run, on its own: residual draws and ordinary ones.
    assert not verified.failed.any()


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_tokens_of_a_run_are_independent(rule: str) -> None:
    """Pairs of the first two committed tokens: a shared word between coin, draft and residual would show here.

    Only where both rows were verified whatever happened: the second token exists if the first draft was accepted, so
    the pair's first token follows the distribution of accepted drafts, and the second one the target's.
    """
    case = Case(TARGET, NEAR, _params())
    verified = run(case, rule, _all(5))
    expected = distribution(case)
    for first in range(VOCAB):
        there = ((verified.counts - 1) >= 1) & (verified.token_ids[:, 0] == first)
        if there.sum() > 1000:
            assert chi_square(verified.token_ids[there, 1], expected) < MAX_CHI_SQUARE, first


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_a_one_hot_draft_is_lossless(rule: str) -> None:
    case = Case(TARGET, FAR, _params())
    verified = run(case, rule, _all(3), one_hot=True)
    assert chi_square(verified.token_ids[:, 0], distribution(case)) < MAX_CHI_SQUARE


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_a_draft_that_the_target_excludes_is_replaced(rule: str) -> None:
    """The target allows only what the draft never says: the residual is the target itself."""
    target = torch.where(torch.arange(VOCAB) < 5, TARGET, -torch.inf)
    proposed = torch.where(torch.arange(VOCAB) < 5, -torch.inf, TARGET)
    case = Case(target, proposed, _params())
    verified = run(case, rule, _all(2))
    assert (verified.counts - 1).max() == 0
    assert chi_square(verified.token_ids[:, 0], distribution(case)) < MAX_CHI_SQUARE


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_cuts_that_do_not_look_at_drafts_are_lossless(rule: str) -> None:
    """Where a sequence's drafts end, its last token is an ordinary draw, not a residual one."""
    case = Case(TARGET, FAR, _params())
    num_drafts = torch.arange(COUNT) % 6
    verified = run(case, rule, num_drafts)
    assert ((verified.counts - 1) <= num_drafts).all()
    for length in range(6):
        there = num_drafts == length
        assert chi_square(verified.token_ids[there, 0], distribution(case)) < MAX_CHI_SQUARE, length
        whole = there & ((verified.counts - 1) == length)
        if whole.sum() > 200:
            last = verified.token_ids[whole, length]
            assert chi_square(last, distribution(case)) < MAX_CHI_SQUARE, length


def test_shared_noise_commits_what_is_drawn_without_drafts() -> None:
    case = Case(TARGET, NEAR, _params(temperature=0.8, top_p=0.95))
    verified = run(case, "shared_noise", _all(5))
    plain = torch.stack([run(case, "shared_noise", _all(0), position=5 + j).token_ids[:, 0] for j in range(6)], 1)
    committed = torch.arange(6) <= (verified.counts - 1)[:, None]
    assert torch.equal(verified.token_ids[committed], plain[committed])
    assert set((verified.counts - 1).tolist()) == set(range(6))


@pytest.mark.parametrize(("proposed", "least"), [(NEAR, 0.0), (FAR, 0.0)])
def test_rejection_accepts_as_often_as_the_distributions_overlap(proposed: Tensor, least: float) -> None:
    case = Case(TARGET, proposed, _params())
    overlap = float(torch.minimum(torch.softmax(TARGET, 0), torch.softmax(proposed, 0)).sum())
    accepted = {}
    for rule in ("rejection", "shared_noise"):
        accepted[rule] = float((run(case, rule, _all(5)).counts - 1 > least).double().mean())
    assert accepted["rejection"] == pytest.approx(overlap, abs=0.015)
    assert accepted["shared_noise"] <= overlap + 0.015


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_greedy_sequences_accept_what_equals_the_arg_max(rule: str) -> None:
    params = _params(temperature=0.0)
    same = run(Case(TARGET, TARGET, params, count=50), rule, torch.full((50,), 4))
    assert (same.counts - 1).tolist() == [4] * 50
    assert (same.token_ids == 0).all()
    other = run(Case(TARGET, FAR, params, count=50), rule, torch.full((50,), 4))
    assert (other.counts - 1).tolist() == [0] * 50
    assert (other.token_ids[:, 0] == 0).all()
