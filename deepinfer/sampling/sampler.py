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
from deepinfer.sampling.logprobs import token_logprobs
from deepinfer.sampling.noise import TOKEN_PURPOSE, derived_seeds
from deepinfer.sampling.processors import apply_rules, truncate
from deepinfer.sampling.state import SamplingState
from deepinfer.structured_outputs.bitmask import mask_scores


@dataclass(slots=True, frozen=True)
class Sampled:
    """`token_ids` [R] int64; `logprobs`: one token's columns for each row that asked, else None.

    `failed` [R] bool: the row's numbers were unusable; its token id is 0 and means nothing.
    `fell_back` [R] bool: the rules left no token; it was drawn from the raw logits of the allowed ids instead.
    """

    token_ids: Tensor
    logprobs: list[LogprobColumns | None]
    failed: Tensor
    fell_back: Tensor


@dataclass(slots=True, frozen=True)
class Processed:
    """`scores` [R, V] float32 after the rules, perhaps the logits themselves: not to be written to.

    `failed`, `fell_back` [R] bool as in `Sampled`.
    """

    scores: Tensor
    failed: Tensor
    fell_back: Tensor


def sample(
    logits: Tensor,
    *,
    slots: Tensor,
    samples: Tensor,
    positions: Tensor,
    token_table: Tensor,
    state: SamplingState,
) -> Sampled:
    """Choose one token for each row of `logits` [R, V] float32 (left as it is).

    [R] int64 each: `slots`; `samples`, the sample number of the row's sequence; `positions`, the position of the token
    to be produced. `token_table` [S, L] int32: tokens of a slot by position; those before `positions[r]`, drafts under
    verification included, are row r's history.
    """
    processed = process(logits, slots=slots, positions=positions, token_table=token_table, state=state)
    token_ids = choose(
        processed.scores, processed.failed, slots=slots, samples=samples, positions=positions, state=state
    )
    logprobs = collect_logprobs(logits, token_ids, processed.failed, slots, state)
    return Sampled(token_ids=token_ids, logprobs=logprobs, failed=processed.failed, fell_back=processed.fell_back)


def process(
    logits: Tensor, *, slots: Tensor, positions: Tensor, token_table: Tensor, state: SamplingState
) -> Processed:
    """Apply the rules to each row; arguments as for `sample`."""
    failed = unusable_rows(logits)
    fell_back = torch.zeros_like(failed)
    scores = masked = logits
    if state.masks is not None:
        scores = masked = logits.clone()
        mask_scores(masked, state.masks, slots=slots, positions=positions)
    if state.rules:
        scores = masked.clone()
        _apply_all_rules(scores, masked, fell_back, slots, positions, token_table, state)
    if scores is not logits:
        failed = failed | ~scores.amax(dim=1).isfinite()
    return Processed(scores, failed, fell_back & ~failed)


def unusable_rows(logits: Tensor) -> Tensor:
    """Return [R] bool: rows with a NaN or +inf anywhere, or -inf everywhere; their request has to fail."""
    return ~logits.amax(dim=1).isfinite()


def _apply_all_rules(
    scores: Tensor,
    masked: Tensor,
    fell_back: Tensor,
    slots: Tensor,
    positions: Tensor,
    token_table: Tensor,
    state: SamplingState,
) -> None:
    """Run each row's rules on `scores`, in place; where no id is left, start again with the allowed ids alone.

    That happens when min_tokens or bad words exclude all that is allowed. Such a row is marked in `fell_back`. What
    a grammar allows has been applied to `masked`.
    """
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        rules = state.rules.get(slot)
        if rules is None:
            continue
        apply_rules(scores[row], rules, token_table[slot, :position])
        if scores[row].amax() == -math.inf:
            fell_back[row] = True
            scores[row] = masked[row]
            if rules.banned is not None:
                scores[row].masked_fill_(rules.banned, -math.inf)


def choose(
    scores: Tensor,
    failed: Tensor,
    *,
    slots: Tensor,
    samples: Tensor,
    positions: Tensor,
    state: SamplingState,
    purpose: int = TOKEN_PURPOSE,
) -> Tensor:
    """Return the token ids [R] int64: arg-max for greedy rows, else a draw with the noise of `purpose`; 0 if failed.

    `scores` [R, V] as `process` returns them, `failed` [R] bool; the rest as for `sample`.
    """
    token_ids = scores.argmax(dim=1)
    if state.drawing:
        rows = (~state.greedy[slots] & ~failed).nonzero().flatten()
        if len(rows):
            owners = slots[rows]
            seeds = derived_seeds(state.seeds[owners], samples[rows])
            tempered = temper(scores[rows], owners, state)
            token_ids[rows] = state.gumbel_argmax(
                tempered, seeds, positions[rows], torch.ones_like(tempered[:, 0]), purpose=purpose
            )
    return token_ids.masked_fill_(failed, 0)


def temper(scores: Tensor, slots: Tensor, state: SamplingState) -> Tensor:
    """Return a copy of `scores` [R, V] divided by the slots' temperatures and truncated: softmax of it is drawn from.

    The rows' slots are not greedy.
    """
    tempered = scores / state.temperatures[slots][:, None]
    if state.truncating:
        truncate(tempered, top_k=state.top_k[slots], top_p=state.top_p[slots], log_min_p=state.log_min_p[slots])
    return tempered


def collect_logprobs(
    logits: Tensor, token_ids: Tensor, failed: Tensor, slots: Tensor, state: SamplingState
) -> list[LogprobColumns | None]:
    """Return one token's columns for each row of raw `logits` [R, V] that asked and has not failed, else None."""
    columns: list[LogprobColumns | None] = [None] * len(logits)
    if not state.num_logprobs:
        return columns
    row_failed = failed.tolist()
    wanted = {
        row: state.num_logprobs[slot]
        for row, slot in enumerate(slots.tolist())
        if slot in state.num_logprobs and not row_failed[row]
    }
    if wanted:
        rows = torch.tensor(list(wanted), device=logits.device)
        for row, column in zip(
            wanted, token_logprobs(logits[rows], token_ids[rows], list(wanted.values())), strict=True
        ):
            columns[row] = column
    return columns
