"""The results of a step on their way to the host: copies that the device has been told to make, and their meaning."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from deepinfer.platforms.transfer import to_host, to_host_together
from deepinfer.protocol import LogprobColumns
from deepinfer.runtime.speculation import Committed
from deepinfer.sampling.logprobs import RankedTokens
from deepinfer.sampling.sampler import OwnerLogprobs, Sampled
from deepinfer.scheduler.logprob_columns import join_logprobs
from deepinfer.scheduler.step_plan import PrefillChunk, SlotOutput, StepOutput, StepPlan
from deepinfer.speculative.drafter import Drafts

BAD_NUMBERS = "the model's output has unusable numbers (NaN or infinite logits)"


@dataclass(slots=True, frozen=True)
class PendingDraws:
    """What sampling chunks drew: `chunks` by draw; a chunk's draws stand together."""

    chunks: tuple[PrefillChunk, ...]
    token_ids: torch.Tensor
    failed: torch.Tensor
    fell_back: torch.Tensor | None
    logprobs: OwnerLogprobs | None


@dataclass(slots=True, frozen=True)
class PendingPrompt:
    """A piece of a prompt's log-probabilities; `failed`: bool per row, its numbers are unusable."""

    slot: int
    num_top: int
    num_rows: int
    ranked: RankedTokens
    failed: torch.Tensor


@dataclass(slots=True, frozen=True)
class PendingRows:
    """`Committed` on the host: the first `len(plan.decode_slots)` sequences are the plan's."""

    token_ids: torch.Tensor
    counts: torch.Tensor
    failed: torch.Tensor
    fell_back: torch.Tensor | None
    num_drafted: torch.Tensor
    draft_ids: torch.Tensor | None
    confidence: torch.Tensor | None
    logprobs: OwnerLogprobs | None


@dataclass(slots=True, frozen=True)
class PendingOutput:
    """Call `resolve` when the step has ended on the device, and for each step in turn.

    `unusable`: slots whose prompt gave unusable numbers in an earlier chunk; only `resolve` touches it.
    """

    plan: StepPlan
    unusable: set[int]
    draws: PendingDraws | None = None
    prompts: tuple[PendingPrompt, ...] = field(default=())
    rows: PendingRows | None = None

    def resolve(self) -> StepOutput:
        """Return the results."""
        self.unusable.difference_update(admission.slot for admission in self.plan.admissions)
        output = StepOutput(self.plan.step_id, prompt_logprobs=self._prompt_logprobs())
        output.slots = (*self._chunk_outputs(), *self._decode_outputs())
        count = len(self.plan.decode_slots)
        if self.rows is not None and self.rows.draft_ids is not None:
            output.draft_ids = self.rows.draft_ids[:count].numpy().astype(np.int32)
        if self.rows is not None and self.rows.confidence is not None:
            output.confidence = self.rows.confidence[:count].numpy()
        return output

    def _prompt_logprobs(self) -> dict[int, LogprobColumns]:
        columns = {}
        for prompt in self.prompts:
            if bool(prompt.failed.any()):
                self.unusable.add(prompt.slot)
            columns[prompt.slot] = prompt.ranked.columns(0, prompt.num_rows, prompt.num_top)
        return columns

    def _chunk_outputs(self) -> list[SlotOutput]:
        """One entry for each sampling chunk, in plan order."""
        if self.draws is None:
            return []
        outputs, start = [], 0
        chunks = self.draws.chunks
        while start < len(chunks):
            slot = chunks[start].slot
            end = next((place for place in range(start, len(chunks)) if chunks[place].slot != slot), len(chunks))
            outputs.append(self._chunk_output(self.draws, slot, start, end))
            start = end
        return outputs

    def _chunk_output(self, draws: PendingDraws, slot: int, start: int, end: int) -> SlotOutput:
        if slot in self.unusable or bool(draws.failed[start:end].any()):
            return SlotOutput(slot, np.zeros(0, np.int32), failure=BAD_NUMBERS)
        found = [draws.logprobs.columns(place, 1) if draws.logprobs else None for place in range(start, end)]
        columns = [column for column in found if column is not None]
        token_ids = draws.token_ids[start:end].numpy().astype(np.int32)
        fell_back = None if draws.fell_back is None else draws.fell_back[start:end].numpy()
        return SlotOutput(slot, token_ids, join_logprobs(columns) if columns else None, fell_back=fell_back)

    def _decode_outputs(self) -> list[SlotOutput]:
        if self.rows is None:
            return []
        token_ids, logprobs = self.rows.token_ids.numpy().astype(np.int32), self.rows.logprobs
        fell_back = None if self.rows.fell_back is None else self.rows.fell_back.numpy()
        counts, drafted, failed = (
            part.tolist() for part in (self.rows.counts, self.rows.num_drafted, self.rows.failed)
        )
        outputs = []
        for place, slot in enumerate(self.plan.decode_slots.tolist()):
            count = counts[place]
            if count == 0 or failed[place]:
                failure = BAD_NUMBERS if failed[place] else None
                outputs.append(SlotOutput(slot, np.zeros(0, np.int32), failure=failure))
                continue
            outputs.append(
                SlotOutput(
                    slot,
                    token_ids[place, :count],
                    logprobs.columns(place, count) if logprobs else None,
                    num_drafted=drafted[place],
                    num_accepted=count - 1,
                    fell_back=None if fell_back is None else fell_back[place, :count],
                )
            )
        return outputs


def pending_draws(sampled: Sampled, chunks: tuple[PrefillChunk, ...]) -> PendingDraws:
    """Send what was drawn to the host."""
    fell_back = None if sampled.fell_back is None else to_host(sampled.fell_back)
    return PendingDraws(chunks, to_host(sampled.token_ids), to_host(sampled.failed), fell_back, sampled.logprobs)


def pending_rows(committed: Committed, drafts: Drafts | None, logprobs: OwnerLogprobs | None) -> PendingRows:
    """Send what was committed and drafted to the host."""
    parts = {
        "token_ids": committed.token_ids,
        "counts": committed.counts,
        "failed": committed.failed,
        "fell_back": committed.fell_back,
        "num_drafted": committed.num_drafted,
        "draft_ids": None if drafts is None else drafts.token_ids,
        "confidence": None if drafts is None else drafts.confidence,
    }
    sent = to_host_together({name: part for name, part in parts.items() if part is not None})
    return PendingRows(
        token_ids=sent["token_ids"],
        counts=sent["counts"],
        failed=sent["failed"],
        fell_back=sent.get("fell_back"),
        num_drafted=sent["num_drafted"],
        draft_ids=sent.get("draft_ids"),
        confidence=sent.get("confidence"),
        logprobs=logprobs,
    )
