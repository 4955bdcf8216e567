"""What happens to the scores of a row between the model and the draw. Each row is independent of all others.

Two stages: rules (allowed ids, bias, min_tokens, penalties, bad words) on raw logits, and truncation (min_p, top_k,
top_p) on scores already divided by the temperature. Both work in place; an excluded id has the score -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.sampling.state import ScoreRules

_MASS_ONE = 2.0**40  # sums of a whole vocabulary stay below 2**63


def apply_rules(scores: Tensor, rules: ScoreRules, tokens: Tensor, positions: Tensor) -> None:
    """Change the `scores` [n, V] float32 of one sequence's rows, in the order of the module's first stage.

    `tokens` [P] int32: the sequence's tokens, prompt first, drafts included; those before `positions[i]` [n] int64, the
    position of the token to be chosen, are row i's history. Drafts under verification count as output. Output tokens
    are those from `num_prompt_tokens` on; bad words match within them only.
    """
    if rules.banned is not None:
        scores.masked_fill_(rules.banned, -math.inf)
    scores[:, rules.bias_ids] += rules.bias_values
    if rules.min_tokens > 0:
        is_early = (positions - rules.num_prompt_tokens < rules.min_tokens)[:, None]
        scores[:, rules.stop_ids] = scores[:, rules.stop_ids].masked_fill(is_early, -math.inf)
    _apply_penalties(scores, rules, tokens, positions)
    if rules.bad_words is not None:
        scores.masked_fill_(_completing(rules, tokens, positions, scores.shape[1]), -math.inf)


def _apply_penalties(scores: Tensor, rules: ScoreRules, tokens: Tensor, positions: Tensor) -> None:
    """Repetition over prompt and output (z / r where z > 0, else z * r), then frequency and presence over output."""
    if rules.repetition_penalty != 1.0:
        seen = _counts(tokens, 0, positions, scores.shape[1]) > 0
        penalised = torch.where(scores > 0, scores / rules.repetition_penalty, scores * rules.repetition_penalty)
        scores.copy_(torch.where(seen, penalised, scores))
    if rules.presence_penalty != 0.0 or rules.frequency_penalty != 0.0:
        counts = _counts(tokens, rules.num_prompt_tokens, positions, scores.shape[1])
        penalty = rules.presence_penalty + rules.frequency_penalty * counts.float()
        scores.copy_(torch.where(counts > 0, scores - penalty, scores))


def _counts(tokens: Tensor, first: int, positions: Tensor, vocab_size: int) -> Tensor:
    """Return int32 [n, vocab_size]: how often each id stands from position `first` on and before `positions` [n]."""
    places = torch.arange(len(tokens), device=tokens.device)
    counted = (places >= first) & (places < positions[:, None])
    ids = tokens.to(torch.int64).expand(len(positions), -1)
    counts = torch.zeros(len(positions), vocab_size, dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(1, ids, counted.to(torch.int32))


def _completing(rules: ScoreRules, tokens: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return [n, vocab_size] bool: ids that would complete a bad word behind a row's output.

    A word of one token always counts.
    """
    assert rules.bad_words is not None, "the caller has looked"
    beginnings, last_ids, lengths = rules.bad_words.beginnings, rules.bad_words.last_ids, rules.bad_words.lengths
    places = positions[:, None] + torch.arange(-beginnings.shape[1], 0, device=tokens.device)
    tails = tokens[places.clamp(0, len(tokens) - 1)]
    equal = ((tails[:, None] == beginnings) | (beginnings < 0)).all(2)
    fits = positions[:, None] - (lengths - 1) >= rules.num_prompt_tokens
    hits = torch.zeros(len(positions), vocab_size, dtype=torch.int32, device=tokens.device)
    completed = (equal & (fits | (lengths == 1))).to(torch.int32)
    return hits.scatter_add_(1, last_ids.expand(len(positions), -1), completed) > 0


def truncate(
    scores: Tensor, *, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, max_top_k: int, with_top_p: bool
) -> None:
    """Exclude the unlikely ids of each row of `scores` [R, V] float32 (already divided by the temperature).

    min_p keeps p >= min_p * max(p); then top_k [R] int64 keeps scores >= the k-th largest, so ties all stay; then
    top_p [R] float64 keeps the smallest set, by descending score and ascending id, whose mass reaches top_p. At least
    the most likely id always stays. Values that switch a rule off: see `SamplingState`. `max_top_k` is the largest
    top_k of the rows where it is on, 0 if there are none; `with_top_p`: it is on in some row.
    """
    scores.masked_fill_(scores < scores.amax(dim=1, keepdim=True) + log_min_p[:, None], -math.inf)
    if max_top_k:
        scores.masked_fill_(scores < _top_k_bound(scores, top_k, max_top_k), -math.inf)
    if with_top_p:
        scores.masked_fill_(_behind_top_p(scores, top_p), -math.inf)


def _top_k_bound(scores: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Return [R, 1]: the least score that top_k keeps, -inf where it is off."""
    largest = torch.topk(scores, max_top_k, dim=1).values
    bound = largest.gather(1, top_k.clamp(1, max_top_k)[:, None] - 1)
    return bound.masked_fill((top_k >= scores.shape[1])[:, None], -math.inf)


def _behind_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Return [R, V] bool: ids that top_p drops; none where it is off."""
    ordered, ids = torch.sort(scores, dim=1, descending=True, stable=True)
    masses = integer_masses(ordered)
    needed = (masses.sum(dim=1).to(torch.float64) * top_p).ceil().to(torch.int64)
    dropped = (masses.cumsum(dim=1) - masses >= needed[:, None]) & (top_p < 1.0)[:, None]
    return torch.zeros_like(dropped).scatter(1, ids, dropped)


def integer_masses(scores: Tensor) -> Tensor:
    """Return exp(score - maximum of the row) in units of 2**-40, rounded, [R, V] int64.

    Sums of integers are exact in any order: what is decided from them can't depend on how a device adds, and so not on
    the batch.
    """
    shifted = scores.to(torch.float64) - scores.amax(dim=1, keepdim=True).to(torch.float64)
    return shifted.exp_().mul_(_MASS_ONE).round_().to(torch.int64)


def log_normalizers(scores: Tensor) -> Tensor:
    """Return log(sum(exp(scores))) of each row, [R] float64, from integer masses."""
    total = integer_masses(scores).sum(dim=1).to(torch.float64)
    return scores.amax(dim=1).to(torch.float64) + (total / _MASS_ONE).log()
