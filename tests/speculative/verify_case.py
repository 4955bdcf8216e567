"""Verification without a model: a target and a draft distribution over a few tokens, many sequences at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.protocol import SamplingParams
from deepinfer.sampling.noise import DRAFT_PURPOSE, TOKEN_PURPOSE
from deepinfer.sampling.sampler import choose, temper
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.verifier import RejectionVerifier, SharedNoiseVerifier, Verified, VerifyRows

VOCAB = 10
NUM_SLOTS = 20_001


@dataclass
class Case:
    """`count` sequences with the same two distributions at every position; each has its own seed."""

    target: Tensor  # [V] logits
    proposed: Tensor  # [V] logits of the draft
    params: SamplingParams
    count: int = NUM_SLOTS - 1

    def state(self) -> SamplingState:
        state = SamplingState(self.count + 1, VOCAB, torch.device("cpu"), eos_token_id=0)
        slots = range(1, self.count + 1)
        state.samples = {slot: range(1) for slot in slots}
        one = SamplingState(2, VOCAB, torch.device("cpu"), eos_token_id=0)
        one.admit(1, self.params, num_prompt_tokens=1)
        for name in ("temperatures", "greedy", "top_k", "top_p", "log_min_p"):
            getattr(state, name)[1:] = getattr(one, name)[1]
        state.seeds[1:] = torch.arange(1, self.count + 1) * 7919
        state.truncating = set(slots) if one.truncating else set()
        state.drawing = set(slots) if one.drawing else set()
        return state


def run(case: Case, rule: str, num_drafts: Tensor, *, position: int = 5, one_hot: bool = False) -> Verified:
    """Draft and verify once for every sequence: `num_drafts` [count], at most 5. `one_hot`: drafts by arg-max."""
    state, slots = case.state(), torch.arange(1, case.count + 1)
    is_rejection = rule == "rejection"
    samples = torch.zeros_like(slots)
    token_table = torch.zeros(case.count + 1, position + 6, dtype=torch.int32)
    draft_scores = torch.zeros(case.count + 1, 5, VOCAB)
    scores = case.proposed.expand(case.count, VOCAB)
    if one_hot:
        scores = torch.full_like(scores, -torch.inf)
        scores[:, int(case.proposed.argmax())] = 0.0
    for place in range(5):
        drafts = choose(
            scores,
            torch.zeros_like(slots, dtype=torch.bool),
            slots=slots,
            samples=samples,
            positions=torch.full_like(slots, position + place),
            state=state,
            purpose=DRAFT_PURPOSE + place if is_rejection else TOKEN_PURPOSE,
        )
        token_table[slots, position + place] = drafts.int()
        draft_scores[slots, place] = temper(scores, slots, state)
    rows = VerifyRows(
        slots=slots,
        samples=samples,
        num_drafts=num_drafts,
        positions=torch.full_like(slots, position),
        max_drafts=5,
        token_table=token_table,
        draft_scores=draft_scores,
    )
    logits = case.target.expand(int((num_drafts + 1).sum()), VOCAB)
    verifier = RejectionVerifier() if is_rejection else SharedNoiseVerifier()
    return verifier.verify(logits, rows, state)


def distribution(case: Case) -> Tensor:
    """The target's distribution [V] after temperature and truncation."""
    state = case.state()
    return torch.softmax(temper(case.target[None], torch.tensor([1]), state), 1)[0].double()


def chi_square(token_ids: Tensor, expected: Tensor) -> float:
    """Of counts against probabilities; ids with probability 0 must not occur."""
    counts = torch.bincount(token_ids, minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0, counts
    wanted = expected * len(token_ids)
    kept = wanted > 0
    return float(((counts - wanted)[kept] ** 2 / wanted[kept]).sum())
