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

from deepinfer.kernels.reference.sampling import noise_words
from deepinfer.sampling.noise import ACCEPTANCE_PURPOSE, RESIDUAL_PURPOSE, derived_seeds
from deepinfer.sampling.sampler import choose, process, temper
from deepinfer.sampling.state import SamplingState


@dataclass(slots=True, frozen=True)
class VerifyRows:
    """The rows of B sequences: 1 + `num_drafts[b]` each, one after the other, N in all.

    [B] int64: `slots`, `samples`, `num_drafts`, and `positions` of the tokens that the first rows produce, which are
    the positions of the first drafts. `max_drafts` is the widest that `num_drafts` may be. `token_table` [S, L] int32
    holds the drafts; L has room for `max_drafts` tokens from any of `positions` on. `draft_scores` [S, max_drafts, V]:
    by slot, see `Drafts.scores`; only rejection needs them.
    """

    slots: Tensor
    samples: Tensor
    num_drafts: Tensor
    positions: Tensor
    max_drafts: int
    token_table: Tensor
    draft_scores: Tensor | None = None

    def flat(self) -> FlatRows:
        """Return what each of the N rows belongs to."""
        counts = self.num_drafts + 1
        sequence = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        starts = counts.cumsum(0) - counts
        offsets = torch.arange(len(sequence), device=counts.device) - starts[sequence]
        steps = torch.arange(self.max_drafts + 1, device=counts.device)
        return FlatRows(
            slots=self.slots[sequence],
            samples=self.samples[sequence],
            positions=self.positions[sequence] + offsets,
            offsets=offsets,
            is_draft=offsets < self.num_drafts[sequence],
            by_sequence=starts[:, None] + torch.minimum(steps, self.num_drafts[:, None]),
        )

    def drafts(self) -> Tensor:
        """Return the drafts [B, max_drafts] int64; what stands behind a sequence's own number means nothing."""
        columns = self.positions[:, None] + torch.arange(self.max_drafts, device=self.positions.device)
        return self.token_table[self.slots[:, None], columns].to(torch.int64)


@dataclass(slots=True, frozen=True)
class FlatRows:
    """`slots`, `samples`, `positions`, `offsets` [N] int64: row `offsets[r]` of its sequence produces `positions[r]`.

    `is_draft` [N] bool: a draft stands at the position that the row produces. `by_sequence` [B, 1 + max_drafts]: the
    rows of each sequence, its last one repeated.
    """

    slots: Tensor
    samples: Tensor
    positions: Tensor
    offsets: Tensor
    is_draft: Tensor
    by_sequence: Tensor


@dataclass(slots=True, frozen=True)
class Verified:
    """`token_ids` [B, 1 + max_drafts] int64, of which the first `num_accepted[b] + 1` are committed.

    `failed` [B] bool: a committed row had unusable numbers. `rows` [B, 1 + max_drafts]: the row of each token.
    """

    token_ids: Tensor
    num_accepted: Tensor
    failed: Tensor
    rows: Tensor


class Verifier(Protocol):
    """Decides from the target's `logits` [N, V] float32 of the rows."""

    def verify(self, logits: Tensor, rows: VerifyRows, state: SamplingState) -> Verified:
        """Return the committed tokens of each sequence."""
        ...


class SharedNoiseVerifier:
    """See the module."""

    def verify(self, logits: Tensor, rows: VerifyRows, state: SamplingState) -> Verified:
        """See `Verifier`."""
        flat = rows.flat()
        found = _compare(logits, rows, flat, state)
        return _conclude(found.token_ids, found.accepted, found.failed, flat)


class RejectionVerifier:
    """See the module."""

    def verify(self, logits: Tensor, rows: VerifyRows, state: SamplingState) -> Verified:
        """See `Verifier`."""
        assert rows.draft_scores is not None, "rejection needs the distributions that drafts were drawn from"
        flat = rows.flat()
        found = _compare(logits, rows, flat, state)
        drafts, token_ids, accepted = found.drafts, found.token_ids, found.accepted
        drawn = (flat.is_draft & ~state.greedy[flat.slots] & ~found.failed).nonzero().flatten()
        if len(drawn):
            slots, positions = flat.slots[drawn], flat.positions[drawn]
            target = torch.softmax(temper(found.scores[drawn], slots, state), 1)
            proposed = torch.softmax(rows.draft_scores[slots, flat.offsets[drawn]], 1)
            seeds = derived_seeds(state.seeds[slots], flat.samples[drawn])
            taken = _accept(target, proposed, drafts[drawn], seeds, positions)
            residual = _residual(target, proposed)
            ones = torch.ones_like(residual[:, 0])
            replaced = state.gumbel_argmax(residual.log(), seeds, positions, ones, purpose=RESIDUAL_PURPOSE)
            accepted[drawn] = taken
            token_ids[drawn] = torch.where(taken, drafts[drawn], replaced)
        return _conclude(token_ids, accepted, found.failed, flat)


@dataclass(slots=True, frozen=True)
class _Compared:
    """By row: the target's `scores` [N, V], its own token, the draft, whether they are equal, unusable numbers."""

    scores: Tensor
    token_ids: Tensor
    drafts: Tensor
    accepted: Tensor
    failed: Tensor


def _compare(logits: Tensor, rows: VerifyRows, flat: FlatRows, state: SamplingState) -> _Compared:
    """Draw the target's token in every row and accept the drafts that are it."""
    slots, positions = flat.slots, flat.positions
    processed = process(logits, slots=slots, positions=positions, token_table=rows.token_table, state=state)
    token_ids = choose(
        processed.scores, processed.failed, slots=slots, samples=flat.samples, positions=positions, state=state
    )
    drafts = rows.token_table[slots, positions].to(torch.int64)
    accepted = flat.is_draft & (token_ids == drafts) & ~processed.failed
    return _Compared(processed.scores, token_ids, drafts, accepted, processed.failed)


def _accept(target: Tensor, proposed: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Toss each draft's coin: u * Q(draft) < P(draft), u uniform in (0, 1)."""
    words = noise_words(seeds, positions, purpose=ACCEPTANCE_PURPOSE, num_tokens=1)[:, 0]
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    chosen = drafts[:, None]
    return uniform * proposed.gather(1, chosen)[:, 0].double() < target.gather(1, chosen)[:, 0].double()


def _residual(target: Tensor, proposed: Tensor) -> Tensor:
    """max(P - Q, 0) up to a factor [n, V]; P where nothing is left."""
    residual = (target - proposed).clamp_min_(0)
    return torch.where(residual.sum(1, keepdim=True) > 0, residual, target)


def _conclude(token_ids: Tensor, accepted: Tensor, failed: Tensor, flat: FlatRows) -> Verified:
    """Find each sequence's accepted run; its token is the last committed one."""
    rows = flat.by_sequence
    num_accepted = accepted[rows[:, :-1]].long().cumprod(1).sum(1)
    committed = torch.arange(rows.shape[1], device=rows.device) <= num_accepted[:, None]
    return Verified(
        token_ids=token_ids[rows],
        num_accepted=num_accepted,
        failed=(failed[rows] & committed).any(1),
        rows=rows,
    )
