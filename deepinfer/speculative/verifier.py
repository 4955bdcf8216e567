"""Accepts a prefix of each sequence's drafts and says which tokens are committed. Two rules, both lossless.

"shared_noise": the target draws its own token at every row with the noise of (seed, position) and a draft is accepted
if it is that token. The output is the same, bit for bit, whatever was drafted.

"rejection": a draft t is accepted with probability min(1, P(t) / Q(t)), P the target's distribution and Q the one it
was drawn from; the first rejected one is replaced by a draw from max(P - Q, 0). Somewhat more is accepted; the output
has the same distribution but depends on how many drafts were verified. Speculative sampling as published by Leviathan
et al. and Chen et al., 2023. Greedy sequences are verified by equality under both rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.kernels.reference.draft_rows import accept_rows as reference_accept_rows
from deepinfer.kernels.reference.sampling import noise_words
from deepinfer.kernels.step_ops import AcceptRows
from deepinfer.sampling.noise import ACCEPTANCE_PURPOSE, RESIDUAL_PURPOSE
from deepinfer.sampling.rows import TokenRows
from deepinfer.sampling.sampler import choose, process, temper
from deepinfer.sampling.state import SamplingState


@dataclass(slots=True, frozen=True)
class VerifyRows:
    """R rows of S sequences, each with 1 + `num_drafts[s]` of them in order; -1: the sequence has no rows.

    `rows`: by row, the position that it produces; its owners are the sequences, `by_owner` [S, 1 + K] the rows of each,
    its last one repeated. [R] int64: `offsets`, the place of a row in its sequence; `drafts`, the draft at its
    position, -1 where there is none. `draft_scores` [slots, K, V]: see `Drafts.scores`; only rejection needs them.
    """

    rows: TokenRows
    num_drafts: Tensor
    offsets: Tensor
    drafts: Tensor
    draft_scores: Tensor | None = None


@dataclass(slots=True, frozen=True)
class Verified:
    """`token_ids` [S, 1 + K] int64, of which the first `counts[s]` are committed: accepted drafts and one more.

    `counts` [S] int64 is 0 where the sequence had no rows. `failed` [S] bool: a committed row had unusable numbers.
    `fell_back` [S, 1 + K] bool by token, or None, as in `Sampled`.
    """

    token_ids: Tensor
    counts: Tensor
    failed: Tensor
    fell_back: Tensor | None


class Verifier(Protocol):
    """Decides from the target's `logits` [R, V] float32 of the rows."""

    def verify(self, logits: Tensor, rows: VerifyRows, state: SamplingState) -> Verified:
        """Return the committed tokens of each sequence."""
        ...


class SharedNoiseVerifier:
    """See the module."""

    def __init__(self, accept_rows: AcceptRows = reference_accept_rows) -> None:
        self._accept_rows = accept_rows

    def verify(self, logits: Tensor, rows: VerifyRows, state: SamplingState) -> Verified:
        """See `Verifier`."""
        found = _choose(logits, rows, state)
        return _conclude(self._accept_rows, found, found.token_ids, rows.drafts, rows)


class RejectionVerifier:
    """See the module."""

    def __init__(self, accept_rows: AcceptRows = reference_accept_rows) -> None:
        self._accept_rows = accept_rows

    def verify(self, logits: Tensor, rows: VerifyRows, state: SamplingState) -> Verified:
        """See `Verifier`."""
        assert rows.draft_scores is not None, "rejection needs the distributions that drafts were drawn from"
        found, token_rows = _choose(logits, rows, state), rows.rows
        offsets = rows.offsets.clamp_max(rows.draft_scores.shape[1] - 1)
        target = torch.softmax(temper(found.scores, token_rows, state), 1)
        proposed = torch.softmax(rows.draft_scores[token_rows.slots, offsets], 1)
        taken = _accept(target, proposed, rows.drafts.clamp_min(0), token_rows)
        residual = _residual(target, proposed).log()
        ones = torch.ones_like(residual[:, 0])
        replaced = state.gumbel_argmax(residual, token_rows.seeds, token_rows.positions, ones, purpose=RESIDUAL_PURPOSE)
        drawn = (rows.drafts >= 0) & (state.temperatures[token_rows.slots] != 0) & ~found.failed
        token_ids = torch.where(drawn, torch.where(taken, rows.drafts, replaced), found.token_ids)
        drafts = torch.where(drawn & ~taken, -1, rows.drafts)  # one that is drawn again stays rejected
        return _conclude(self._accept_rows, found, token_ids, drafts, rows)


@dataclass(slots=True, frozen=True)
class _Chosen:
    """By row: the target's `scores` [R, V], its own token, and as in `Sampled`."""

    scores: Tensor
    token_ids: Tensor
    failed: Tensor
    fell_back: Tensor | None


def _choose(logits: Tensor, rows: VerifyRows, state: SamplingState) -> _Chosen:
    """Draw the target's token in every row."""
    processed = process(logits, rows.rows, state)
    token_ids, failed = choose(processed.scores, processed.failed, rows.rows, state)
    return _Chosen(processed.scores, token_ids, failed, processed.fell_back)


def _accept(target: Tensor, proposed: Tensor, drafts: Tensor, rows: TokenRows) -> Tensor:
    """Toss each draft's coin: u * Q(draft) < P(draft), u uniform in (0, 1)."""
    words = noise_words(rows.seeds, rows.positions, purpose=ACCEPTANCE_PURPOSE, num_tokens=1)[:, 0]
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    chosen = drafts[:, None]
    return uniform * proposed.gather(1, chosen)[:, 0].double() < target.gather(1, chosen)[:, 0].double()


def _residual(target: Tensor, proposed: Tensor) -> Tensor:
    """max(P - Q, 0) up to a factor [n, V]; P where nothing is left."""
    residual = (target - proposed).clamp_min_(0)
    return torch.where(residual.sum(1, keepdim=True) > 0, residual, target)


def _conclude(accept_rows: AcceptRows, found: _Chosen, token_ids: Tensor, drafts: Tensor, rows: VerifyRows) -> Verified:
    """Find each sequence's accepted run, where `token_ids` are `drafts` [R]; its token is the last committed one."""
    own = rows.rows.by_owner
    done = accept_rows(token_ids, found.failed, drafts, own, rows.num_drafts)
    fell_back = None if found.fell_back is None else found.fell_back[own]
    return Verified(done.token_ids, done.counts, done.failed, fell_back)
