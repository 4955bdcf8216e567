"""From a step plan and the slot table to what a forward pass and the sampler read. Runs on the device thread.

The plan knows which slots run; how many rows each has and which positions and tokens they hold is read from the slot
table, because the results of the step before may not have reached the host's scheduler yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.model_spec import ForwardInputs, Prompts
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.scheduler.step_plan import PrefillChunk, StepPlan
from deepinfer.speculative.verifier import VerifyRows


@dataclass(slots=True, frozen=True)
class PromptRows:
    """Logits of `num_rows` rows from `first_logit` on tell the log-probabilities of a prompt's next tokens.

    Row t predicts the token at position `first_position + t` of `slot`.
    """

    slot: int
    first_logit: int
    num_rows: int
    first_position: int


@dataclass(slots=True, frozen=True)
class SampleRows:
    """The draws of a step's sampling chunks in plan order, one per sample: R of them.

    [R] int64 each: `logits` the row of the logits, `slots`, `samples` the sample numbers, `positions` of the token to
    be produced. On the host: `owners` (slot, number of draws) in order.
    """

    logits: torch.Tensor
    slots: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor
    owners: tuple[tuple[int, int], ...]


@dataclass(slots=True, frozen=True)
class StepInputs:
    """A step, ready to run. `verify`: the decode slots with rows, `decode_slots` on the host; None if there are none.

    Their logits are the last ones, from `first_verify_logit` on.
    """

    forward: ForwardInputs
    samples: SampleRows
    prompts: tuple[PromptRows, ...]
    verify: VerifyRows | None
    decode_slots: tuple[int, ...]
    first_verify_logit: int


@dataclass(slots=True, frozen=True)
class _Rows:
    """Sequences of a step in order, on the host: slots, row counts, first positions, and where decode slots begin."""

    slots: list[int]
    lengths: list[int]
    starts: list[int]
    first_decode: int
    num_decode: int


def build_inputs(
    plan: StepPlan,
    table: SlotTable,
    *,
    num_drafts: torch.Tensor,
    caches: Any,
    kernels: KernelSet,
    dispatcher: TokenDispatcher,
) -> StepInputs:
    """Lay out chunks, then decode rows. A step without any is one padding row in slot 0, run with the other ranks.

    `num_drafts` [decode slots] int64: drafts that each decode slot runs beside its anchor; -1: it has no rows at all.
    """
    rows = _sequences(plan, num_drafts.tolist())
    device_slots = _to_device(rows.slots, table)
    first_positions = _to_device(rows.starts, table)
    decode = slice(rows.first_decode, rows.first_decode + rows.num_decode)
    first_positions[decode] = table.num_tokens[device_slots[decode]] - 1
    sequence_starts = _to_device([0, *np.cumsum(rows.lengths).tolist()], table)
    num_rows = sum(rows.lengths)
    row_sequence = torch.repeat_interleave(
        torch.arange(len(rows.slots), device=table.device), _to_device(rows.lengths, table), output_size=num_rows
    )
    offsets = torch.arange(num_rows, device=table.device) - sequence_starts[row_sequence]
    positions = first_positions[row_sequence] + offsets
    logit_rows, prompts, draw_rows = _choose_logits(plan, table)
    samples = _sample_rows(plan, table, draw_rows, logit_rows, positions)
    first_verify_logit, first_row = len(logit_rows), sum(rows.lengths[: rows.first_decode])
    logit_rows += range(first_row, first_row + sum(rows.lengths[decode]))
    forward = ForwardInputs(
        token_ids=table.token_table[device_slots[row_sequence], positions].to(torch.int64),
        positions=positions,
        row_sequence=row_sequence,
        sequence_slots=device_slots,
        sequence_starts=sequence_starts,
        block_tables=table.block_rows(rows.slots, device_slots),
        token_table=table.token_table,
        logit_rows=_to_device(logit_rows, table),
        is_padding=(device_slots == 0)[row_sequence],
        caches=caches,
        kernels=kernels,
        dispatcher=dispatcher,
        prompts=_prompts(plan, table),
    )
    return StepInputs(
        forward,
        samples,
        prompts,
        _verify_rows(table, rows.slots[decode], device_slots[decode], first_positions[decode], num_drafts),
        tuple(rows.slots[decode]),
        first_verify_logit,
    )


def _prompts(plan: StepPlan, table: SlotTable) -> Prompts | None:
    if not plan.chunks:
        return None
    return Prompts(
        num_tokens=tuple(table.num_prompt_tokens[chunk.slot] for chunk in plan.chunks),
        first_positions=tuple(chunk.start_position for chunk in plan.chunks),
        num_rows=tuple(chunk.num_tokens for chunk in plan.chunks),
        wants_logits=tuple(chunk.slot in table.prompt_logprobs for chunk in plan.chunks),
    )


def _verify_rows(
    table: SlotTable, slots: list[int], device_slots: torch.Tensor, first_positions: torch.Tensor, drafts: torch.Tensor
) -> VerifyRows | None:
    if not slots:
        return None
    return VerifyRows(
        slots=device_slots,
        samples=table.sample_numbers(slots),
        num_drafts=drafts[drafts >= 0],
        positions=first_positions + 1,
        max_drafts=table.max_drafts,
        token_table=table.token_table,
        draft_scores=table.draft_scores,
    )


def _to_device(values: list[int], table: SlotTable) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=table.device)


def _sequences(plan: StepPlan, num_drafts: list[int]) -> _Rows:
    """Lay out the sequences; first positions of decode slots (0 here) are the device's to know."""
    running = [(slot, drafts + 1) for slot, drafts in zip(plan.decode_slots.tolist(), num_drafts, strict=True)]
    running = [(slot, count) for slot, count in running if count > 0]
    slots = [chunk.slot for chunk in plan.chunks] + [slot for slot, _ in running]
    lengths = [chunk.num_tokens for chunk in plan.chunks] + [count for _, count in running]
    starts = [chunk.start_position for chunk in plan.chunks] + [0] * len(running)
    if not slots:
        slots, lengths, starts = [0], [1], [0]
    return _Rows(slots, lengths, starts, len(plan.chunks), len(running))


def _choose_logits(plan: StepPlan, table: SlotTable) -> tuple[list[int], tuple[PromptRows, ...], list[int]]:
    """Return the chunk rows whose logits are wanted, the prompt rows among them, and each sampling chunk's logit."""
    logit_rows: list[int] = []
    prompts: list[PromptRows] = []
    draw_rows: list[int] = []
    first_row = 0
    for chunk in plan.chunks:
        num_known = _num_prompt_rows(chunk, table)
        if num_known > 0:
            prompts.append(PromptRows(chunk.slot, len(logit_rows), num_known, chunk.start_position + 1))
            logit_rows += range(first_row, first_row + num_known)
        first_row += chunk.num_tokens
        if chunk.samples:
            draw_rows.append(len(logit_rows))
            logit_rows.append(first_row - 1)
    return logit_rows, tuple(prompts), draw_rows


def _num_prompt_rows(chunk: PrefillChunk, table: SlotTable) -> int:
    """Rows of the chunk that predict a token of the prompt, if their log-probabilities are wanted, else 0."""
    if chunk.slot not in table.prompt_logprobs:
        return 0
    return min(chunk.num_tokens, table.num_prompt_tokens[chunk.slot] - 1 - chunk.start_position)


def _sample_rows(
    plan: StepPlan, table: SlotTable, draw_rows: list[int], logit_rows: list[int], positions: torch.Tensor
) -> SampleRows:
    drawing = [chunk.slot for chunk in plan.chunks if chunk.samples]
    numbers = [table.sampling.samples[slot] for slot in drawing]
    draws = [row for row, samples in zip(draw_rows, numbers, strict=True) for _ in samples]
    owners = tuple((slot, len(samples)) for slot, samples in zip(drawing, numbers, strict=True))
    return SampleRows(
        logits=_to_device(draws, table),
        slots=_to_device([slot for slot, count in owners for _ in range(count)], table),
        samples=_to_device([sample for samples in numbers for sample in samples], table),
        positions=positions[_to_device([logit_rows[row] for row in draws], table)] + 1,
        owners=owners,
    )
