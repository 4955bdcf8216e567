"""Verification without a model: a target and a draft distribution over a few tokens, many sequences at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.token_rows import admit, rows_of
from torch import Tensor

from deepinfer.protocol import SamplingParams
from deepinfer.sampling.noise import DRAFT_PURPOSE, TOKEN_PURPOSE
from deepinfer.sampling.rows import TokenRows
from deepinfer.sampling.sampler import draw, temper
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
        one = SamplingState(2, VOCAB, torch.device("cpu"), eos_token_id=0)
        admit(one, 1, self.params, num_prompt_tokens=1)
        for name in ("temperatures", "top_k", "top_p", "log_min_p"):
            getattr(state, name)[1:] = getattr(one, name)[1]
        state.seeds[1:] = torch.arange(1, self.count + 1) * 7919
        state.truncating = dict.fromkeys(slots, one.truncating[1]) if one.truncating else {}
        return state


def run(case: Case, rule: str, num_drafts: Tensor, *, position: int = 5, one_hot: bool = False) -> Verified:
    """Draft and verify once for every sequence: `num_drafts` [count], at most 5. `one_hot`: drafts by arg-max."""
    state, slots = case.state(), torch.arange(1, case.count + 1)
    is_rejection = rule == "rejection"
    token_table = torch.zeros(case.count + 1, position + 6, dtype=torch.int32)
    draft_scores = torch.zeros(case.count + 1, 5, VOCAB)
    scores = case.proposed.expand(case.count, VOCAB)
    if one_hot:
        scores = torch.full_like(scores, -torch.inf)
        scores[:, int(case.proposed.argmax())] = 0.0
    for place in range(5):
        drafting = rows_of(slots.tolist(), state.seeds[slots].tolist(), [position + place] * case.count, token_table)
        purpose = DRAFT_PURPOSE + place if is_rejection else TOKEN_PURPOSE
        token_table[slots, position + place] = draw(scores, drafting, state, purpose=purpose).int()
        draft_scores[slots, place] = temper(scores, drafting, state)
    rows = _verify_rows(num_drafts, state, token_table, position, draft_scores)
    logits = case.target.expand(int((num_drafts + 1).sum()), VOCAB)
    verifier = RejectionVerifier() if is_rejection else SharedNoiseVerifier()
    return verifier.verify(logits, rows, state)


def _verify_rows(
    num_drafts: Tensor, state: SamplingState, token_table: Tensor, position: int, draft_scores: Tensor
) -> VerifyRows:
    """Rows of sequences in the slots from 1 on, all at `position`."""
    counts = num_drafts + 1
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    starts = counts.cumsum(0) - counts
    offsets = torch.arange(len(sequence)) - starts[sequence]
    slots = sequence + 1
    return VerifyRows(
        rows=TokenRows(
            slots=slots,
            seeds=state.seeds[slots],
            positions=position + offsets,
            token_table=token_table,
            owners=tuple(range(1, len(counts) + 1)),
            by_owner=starts[:, None] + torch.minimum(torch.arange(6), num_drafts[:, None]),
            max_position=position + 5,
        ),
        num_drafts=num_drafts,
        offsets=offsets,
        drafts=torch.where(offsets < num_drafts[sequence], token_table[slots, position + offsets].long(), -1),
        draft_scores=draft_scores,
    )


def distribution(case: Case) -> Tensor:
    """The target's distribution [V] after temperature and truncation."""
    state = case.state()
    rows = rows_of([1], [0], [0], torch.zeros(2, 1, dtype=torch.int32))
    return torch.softmax(temper(case.target[None], rows, state), 1)[0].double()


def chi_square(token_ids: Tensor, expected: Tensor) -> float:
    """Of counts against probabilities; ids with probability 0 must not occur."""
    counts = torch.bincount(token_ids, minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0, counts
    wanted = expected * len(token_ids)
    kept = wanted > 0
    return float(((counts - wanted)[kept] ** 2 / wanted[kept]).sum())
