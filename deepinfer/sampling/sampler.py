"""From logits to tokens: rules, temperature, truncation, draw, log-probabilities. One row is one position.

Order for a row, in float32: raw logits (log-probabilities come from these) -> grammar mask -> allowed ids -> logit bias
and min_tokens -> penalties -> bad words -> [greedy: arg-max, lowest id on ties] -> divide by temperature -> min_p ->
top_k -> top_p -> draw with the noise of (seed, position). A row's bits do not depend on other rows, on its place or
on the batch size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.protocol import LogprobColumns
from deepinfer.sampling.logprobs import RankedTokens, num_entries, rank_tokens
from deepinfer.sampling.noise import TOKEN_PURPOSE
from deepinfer.sampling.processors import apply_rules, truncate
from deepinfer.sampling.rows import TokenRows
from deepinfer.sampling.state import SamplingState
from deepinfer.structured_outputs.bitmask import mask_scores


@dataclass(slots=True, frozen=True)
class OwnerLogprobs:
    """Log-probabilities of the owners that asked: `num_top` by place among the owners, in the order of `ranked`.

    Each has `width` rows in it.
    """

    num_top: dict[int, int]
    width: int
    ranked: RankedTokens

    def columns(self, place: int, num_tokens: int) -> LogprobColumns | None:
        """Return the columns of the first `num_tokens` tokens of the owner at `place`; None if it did not ask."""
        if place not in self.num_top:
            return None
        start = list(self.num_top).index(place) * self.width
        return self.ranked.columns(start, start + num_tokens, self.num_top[place])


@dataclass(slots=True, frozen=True)
class Sampled:
    """`token_ids` [R] int64; `logprobs` of the owners that asked.

    `failed` [R] bool: the row's numbers were unusable; its token id is 0 and means nothing.
    `fell_back` [R] bool: the rules left no token; it was drawn from the raw logits of the allowed ids instead. None:
    there were no rules.
    """

    token_ids: Tensor
    logprobs: OwnerLogprobs | None
    failed: Tensor
    fell_back: Tensor | None


@dataclass(slots=True, frozen=True)
class Processed:
    """`scores` [R, V] float32 after the rules, perhaps the logits themselves: not to be written to.

    `failed`, `fell_back` [R] bool as in `Sampled`. `failed` None: the scores alone tell.
    """

    scores: Tensor
    failed: Tensor | None
    fell_back: Tensor | None


def sample(logits: Tensor, rows: TokenRows, state: SamplingState) -> Sampled:
    """Choose one token for each row of `logits` [R, V] float32 (left as it is)."""
    processed = process(logits, rows, state)
    token_ids, failed = choose(processed.scores, processed.failed, rows, state)
    logprobs = rank_owners(logits, token_ids[rows.by_owner], rows.by_owner, rows, state)
    return Sampled(token_ids=token_ids, logprobs=logprobs, failed=failed, fell_back=processed.fell_back)


def process(logits: Tensor, rows: TokenRows, state: SamplingState) -> Processed:
    """Apply the rules to each row of `logits` [R, V]."""
    places = rows.places(state.rules)
    if state.masks is None and not places:
        # truncation could drop what is no number
        return Processed(logits, unusable_rows(logits) if rows.places(state.truncating) else None, None)
    failed, masked = unusable_rows(logits), logits
    if state.masks is not None:
        masked = logits.clone()
        mask_scores(masked, state.masks, slots=rows.slots, positions=rows.positions)
    if not places:
        return Processed(masked, failed | unusable_rows(masked), None)
    scores, fell_back = masked.clone(), torch.zeros_like(failed)
    for place in places:
        _apply_rules_of(place, scores, masked, fell_back, rows, state)
    failed = failed | unusable_rows(scores)
    return Processed(scores, failed, fell_back & ~failed)


def unusable_rows(logits: Tensor) -> Tensor:
    """Return [R] bool: rows with a NaN or +inf anywhere, or -inf everywhere; their request has to fail."""
    return ~logits.amax(dim=1).isfinite()


def _apply_rules_of(
    place: int, scores: Tensor, masked: Tensor, fell_back: Tensor, rows: TokenRows, state: SamplingState
) -> None:
    """Run the rules of the owner at `place` on its rows of `scores`; where no id is left, start again without them.

    That happens when min_tokens or bad words exclude all that is allowed: then the allowed ids alone count, and the row
    is marked in `fell_back`. What a grammar allows has been applied to `masked`.
    """
    slot, own = rows.owners[place], rows.by_owner[place]
    rules, before = state.rules[slot], masked[own]
    changed = before.clone()
    apply_rules(changed, rules, rows.token_table[slot, : rows.max_position], rows.positions[own])
    is_empty = changed.amax(dim=1) == -math.inf
    if rules.banned is not None:
        before.masked_fill_(rules.banned, -math.inf)
    changed = torch.where(is_empty[:, None], before, changed)
    is_own = rows.slots[own] == slot
    scores[own] = torch.where(is_own[:, None], changed, scores[own])
    fell_back[own] = torch.where(is_own, is_empty, fell_back[own])


def choose(scores: Tensor, failed: Tensor | None, rows: TokenRows, state: SamplingState) -> tuple[Tensor, Tensor]:
    """Return the token ids [R] int64, 0 where a row failed, and which did: [R] bool.

    `scores` [R, V] and `failed` as `process` returns them.
    """
    token_ids = draw(scores, rows, state)
    if failed is None:
        return token_ids.clamp_min(0), token_ids < 0
    return token_ids.masked_fill(failed, 0), failed


def draw(
    scores: Tensor,
    rows: TokenRows,
    state: SamplingState,
    *,
    purpose: int = TOKEN_PURPOSE,
    bias: Tensor | None = None,
) -> Tensor:
    """Return token ids [R] int64, -1 where a row's numbers are unusable: arg-max for greedy rows, else a draw.

    Its noise is that of `purpose`. `bias` [R, V] is added to the scores [R, V].
    """
    temperatures = state.temperatures[rows.slots]
    if rows.places(state.truncating):
        scores, bias = temper(scores if bias is None else scores + bias, rows, state), None
        temperatures = (temperatures != 0).to(torch.float32)
    return state.gumbel_argmax(scores, rows.seeds, rows.positions, temperatures, purpose=purpose, bias=bias)


def temper(scores: Tensor, rows: TokenRows, state: SamplingState) -> Tensor:
    """Return a copy of `scores` [R, V] divided by the slots' temperatures and truncated: softmax of it is drawn from.

    Scores of greedy rows stay as they are.
    """
    temperatures = state.temperatures[rows.slots][:, None]
    tempered = scores / torch.where(temperatures == 0, 1.0, temperatures)
    places = rows.places(state.truncating)
    if places:
        wanted = [state.truncating[rows.owners[place]] for place in places]
        own = rows.take(rows.by_owner, places)
        slots, part = rows.slots[own], tempered[own]
        truncate(
            part,
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
            log_min_p=state.log_min_p[slots],
            max_top_k=max(one.top_k for one in wanted),
            with_top_p=any(one.with_top_p for one in wanted),
        )
        tempered[own] = part
    return tempered


def rank_owners(
    logits: Tensor, token_ids: Tensor, row_of: Tensor, rows: TokenRows, state: SamplingState
) -> OwnerLogprobs | None:
    """Return the log-probabilities that owners asked for, from raw `logits` [R, V]; None if nobody did.

    `token_ids` and `row_of` [n, w]: the tokens of each owner, and the rows that they were chosen from.
    """
    places = rows.places(state.num_logprobs)
    if not places:
        return None
    num_top = {place: state.num_logprobs[rows.owners[place]] for place in places}
    most = max(num_entries(count, logits.shape[1]) for count in num_top.values())
    ranked = rank_tokens(logits[rows.take(row_of, places)], rows.take(token_ids, places), most)
    return OwnerLogprobs(num_top, row_of.shape[1], ranked)
