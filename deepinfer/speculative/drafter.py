"""Proposes the tokens behind the last committed one, for every running sequence of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.models.model_spec import DraftInputs, DraftNetwork
from deepinfer.sampling.noise import DRAFT_PURPOSE, TOKEN_PURPOSE
from deepinfer.sampling.rows import TokenRows
from deepinfer.sampling.sampler import draw, temper
from deepinfer.sampling.state import SamplingState


@dataclass(slots=True, frozen=True)
class Anchors:
    """The last committed tokens of B sequences, all tokens before them having run through the target.

    [B] int64 each: `slots` (slot 0 is inert), `positions` and `token_ids`. `token_table` [S, L] int32: tokens by slot
    and position. `owners`: the slots as the host knows them, without inert ones behind them.
    """

    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    token_table: Tensor
    owners: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Drafts:
    """`token_ids` [B, K] int64, draft k for position anchor + 1 + k. None unless asked for: `confidence` [B, K]
    float32, log-odds that draft k is accepted if all before it are; `scores` [B, K, V] float32: softmax of it is what a
    draft was drawn from (greedy rows mean nothing).
    """

    token_ids: Tensor
    confidence: Tensor | None = None
    scores: Tensor | None = None


class Drafter(Protocol):
    """Drafts for a step's sequences. A collective: where a step drafts all ranks of its group call it, also with none.

    `capturable`: a graph may hold it.
    """

    @property
    def capturable(self) -> bool: ...

    def draft(self, anchors: Anchors) -> Drafts:
        """Return K drafts for each anchor; K is the same in every call."""
        ...


class ChainDrafter:
    """Runs a model's draft network: one pass for the block, then token by token with the sequence's own sampling.

    A greedy sequence drafts by arg-max, another one by a draw at its temperature and truncation. Other rules
    (penalties, allowed ids, masks) are the target's alone: they only cost acceptance. Draws share the noise of the
    target's tokens or, if `independent`, have their own and keep the scores that they were drawn from.
    """

    def __init__(
        self,
        network: DraftNetwork,
        *,
        max_drafts: int,
        caches: Any,
        dispatcher: TokenDispatcher,
        state: SamplingState,
        independent: bool,
        with_confidence: bool,
    ) -> None:
        """`max_drafts` (1 .. block size): how many rows of the block become drafts. All of its rows see each other.

        `with_confidence`: whoever plans drafts wants it.
        """
        assert 1 <= max_drafts <= network.block_size, f"{max_drafts} drafts of a block of {network.block_size}"
        self._network = network
        self._max_drafts = max_drafts
        self._caches = caches
        self._dispatcher = dispatcher
        self._state = state
        self._independent = independent
        self._with_confidence = with_confidence

    @property
    def capturable(self) -> bool:
        """See `Drafter`."""
        return self._dispatcher.capturable

    def draft(self, anchors: Anchors) -> Drafts:
        """See `Drafter`."""
        slots, previous = anchors.slots, anchors.token_ids
        block = self._network.run(
            DraftInputs(
                anchor_ids=previous,
                anchor_positions=anchors.positions,
                slots=slots,
                num_drafts=self._max_drafts,
                caches=self._caches,
                dispatcher=self._dispatcher,
            )
        )
        rows = TokenRows(
            slots=slots,
            seeds=self._state.seeds[slots],
            positions=anchors.positions,
            token_table=anchors.token_table,
            owners=anchors.owners,
            by_owner=torch.arange(len(slots), device=slots.device)[:, None],
            max_position=0,
        )
        token_ids, before, kept = [], [], []
        for row in range(self._max_drafts):
            before.append(previous)
            scores, bias = block.logits[:, row], self._network.markov_bias(previous)
            rows = replace(rows, positions=rows.positions + 1)
            if self._independent:
                kept.append(temper(scores + bias, rows, self._state))
            purpose = DRAFT_PURPOSE + row if self._independent else TOKEN_PURPOSE
            previous = draw(scores, rows, self._state, purpose=purpose, bias=bias).clamp_min(0)
            token_ids.append(previous)
        confidence = None
        if self._with_confidence:
            flat = self._network.confidence(block.hidden.flatten(0, 1), torch.stack(before, 1).flatten())
            confidence = flat.unflatten(0, (len(slots), self._max_drafts))
        return Drafts(torch.stack(token_ids, 1), confidence, torch.stack(kept, 1) if kept else None)
