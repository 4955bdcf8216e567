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


def apply_rules(scores: Tensor, rules: ScoreRules, history: Tensor) -> None:
    """Change one row's `scores` [V] float32, in the order of the module's first stage.

    `history` [P]: the sequence's tokens before the one to be chosen, prompt first. Drafts under verification count as
    output. Output tokens are those from `num_prompt_tokens` on; bad words match within them only.
    """
    output = history[rules.num_prompt_tokens :]
    if rules.banned is not None:
        scores.masked_fill_(rules.banned, -math.inf)
    scores[rules.bias_ids] += rules.bias_values
    if len(output) < rules.min_tokens:
        scores[rules.stop_ids] = -math.inf
    _apply_penalties(scores, rules, history, output)
    if rules.bad_words:
        scores[_completing_ids(rules.bad_words, output)] = -math.inf


def _apply_penalties(scores: Tensor, rules: ScoreRules, history: Tensor, output: Tensor) -> None:
    """Repetition over prompt and output (z / r where z > 0, else z * r), then frequency and presence over output."""
    if rules.repetition_penalty != 1.0:
        seen = torch.unique(history).long()
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / rules.repetition_penalty, values * rules.repetition_penalty)
    if rules.presence_penalty != 0.0 or rules.frequency_penalty != 0.0:
        produced, counts = torch.unique(output, return_counts=True)
        scores[produced.long()] -= rules.presence_penalty + rules.frequency_penalty * counts.float()


def _completing_ids(bad_words: tuple[tuple[int, ...], ...], output: Tensor) -> list[int]:
    """Return the ids that would complete a bad word behind `output`; a word of one token always counts."""
    longest = max(len(word) for word in bad_words)
    tail = tuple(output[max(0, len(output) - longest) :].tolist())
    return [word[-1] for word in bad_words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]


def truncate(scores: Tensor, *, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
    """Exclude the unlikely ids of each row of `scores` [R, V] float32 (already divided by the temperature).

    min_p keeps p >= min_p * max(p); then top_k [R] int64 keeps scores >= the k-th largest, so ties all stay; then
    top_p [R] float64 keeps the smallest set, by descending score and ascending id, whose mass reaches top_p. At least
    the most likely id always stays. Values that switch a rule off: see `SamplingState`.
    """
    scores.masked_fill_(scores < scores.amax(dim=1, keepdim=True) + log_min_p[:, None], -math.inf)
    rows = (top_k < scores.shape[1]).nonzero().flatten()
    if len(rows):
        scores[rows] = _keep_top_k(scores[rows], top_k[rows])
    rows = (top_p < 1.0).nonzero().flatten()
    if len(rows):
        scores[rows] = _keep_top_p(scores[rows], top_p[rows])


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    largest = torch.topk(scores, int(top_k.max()), dim=1).values
    return scores.masked_fill(scores < largest.gather(1, top_k[:, None] - 1), -math.inf)


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    ordered, ids = torch.sort(scores, dim=1, descending=True, stable=True)
    masses = integer_masses(ordered)
    needed = (masses.sum(dim=1).to(torch.float64) * top_p).ceil().to(torch.int64)
    dropped = masses.cumsum(dim=1) - masses >= needed[:, None]
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, ids, dropped), -math.inf)


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
