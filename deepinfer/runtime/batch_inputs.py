"""From a step plan and the slot table to what a forward pass and the sampler read. Runs on the device thread.

The host knows how many rows a step has; which positions and tokens they hold is read from the slot table, because the
results of the step before may not have reached the host yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.model_spec import ForwardInputs
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.scheduler.step_plan import PrefillChunk, StepPlan


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
    """The draws of a step, R of them: sampling chunks in plan order (one draw per sample), then decode slots.

    [R] int64 each: `logits` the row of the logits, `slots`, `samples` the sample numbers, `positions` of the token to
    be produced. On the host: `owners` (slot, number of draws) in order. `num_chunk_draws` draws come from chunks.
    """

    logits: torch.Tensor
    slots: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor
    owners: tuple[tuple[int, int], ...]
    num_chunk_draws: int


@dataclass(slots=True, frozen=True)
class StepInputs:
    """A step, ready to run."""

    forward: ForwardInputs
    samples: SampleRows
    prompts: tuple[PromptRows, ...]


def build_inputs(
    plan: StepPlan, table: SlotTable, *, caches: Any, kernels: KernelSet, dispatcher: TokenDispatcher
) -> StepInputs:
    """Lay out chunks, then decode rows, then padding rows (one sequence in slot 0, up to `num_padded_rows` rows)."""
    assert plan.max_rows_per_slot == 1, "this runtime has no drafter, so a decode slot has one uncommitted row"
    slots, lengths, starts = _sequences(plan)
    device_slots = _to_device(slots, table)
    first_positions = _to_device(starts, table)
    decode = slice(len(plan.chunks), len(plan.chunks) + len(plan.decode_slots))
    first_positions[decode] = table.num_tokens[device_slots[decode]] - 1
    sequence_starts = _to_device([0, *np.cumsum(lengths).tolist()], table)
    num_rows = sum(lengths)
    row_sequence = torch.repeat_interleave(
        torch.arange(len(slots), device=table.device), _to_device(lengths, table), output_size=num_rows
    )
    offsets = torch.arange(num_rows, device=table.device) - sequence_starts[row_sequence]
    positions = first_positions[row_sequence] + offsets
    logit_rows, prompts, draw_rows = _choose_logits(plan, table)
    forward = ForwardInputs(
        token_ids=table.token_table[device_slots[row_sequence], positions].to(torch.int64),
        positions=positions,
        row_sequence=row_sequence,
        sequence_slots=device_slots,
        sequence_starts=sequence_starts,
        block_tables=table.block_rows(slots, device_slots),
        token_table=table.token_table,
        logit_rows=_to_device(logit_rows, table),
        is_padding=(device_slots == 0)[row_sequence],
        caches=caches,
        kernels=kernels,
        dispatcher=dispatcher,
    )
    return StepInputs(forward, _sample_rows(plan, table, draw_rows, logit_rows, positions), prompts)


def _to_device(values: list[int], table: SlotTable) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=table.device)


def _sequences(plan: StepPlan) -> tuple[list[int], list[int], list[int]]:
    """Return slots, row counts and first positions; those of decode slots (0 here) are the device's to know."""
    decode_slots = plan.decode_slots.tolist()
    slots = [chunk.slot for chunk in plan.chunks] + decode_slots
    lengths = [chunk.num_tokens for chunk in plan.chunks] + [1] * len(decode_slots)
    starts = [chunk.start_position for chunk in plan.chunks] + [0] * len(decode_slots)
    num_padding = max(plan.num_padded_rows, 1) - sum(lengths)
    if num_padding > 0:
        return [*slots, 0], [*lengths, num_padding], [*starts, 0]
    return slots, lengths, starts


def _choose_logits(plan: StepPlan, table: SlotTable) -> tuple[list[int], tuple[PromptRows, ...], list[int]]:
    """Return the rows whose logits are wanted, the prompt rows among them, and the logit row of each drawing slot."""
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
    num_decode = len(plan.decode_slots)
    draw_rows += range(len(logit_rows), len(logit_rows) + num_decode)
    logit_rows += range(first_row, first_row + num_decode)
    return logit_rows, tuple(prompts), draw_rows


def _num_prompt_rows(chunk: PrefillChunk, table: SlotTable) -> int:
    """Rows of the chunk that predict a token of the prompt, if their log-probabilities are wanted, else 0."""
    if chunk.slot not in table.prompt_logprobs:
        return 0
    return min(chunk.num_tokens, table.num_prompt_tokens[chunk.slot] - 1 - chunk.start_position)


def _sample_rows(
    plan: StepPlan, table: SlotTable, draw_rows: list[int], logit_rows: list[int], positions: torch.Tensor
) -> SampleRows:
    drawing = [chunk.slot for chunk in plan.chunks if chunk.samples] + plan.decode_slots.tolist()
    numbers = [table.sampling.samples[slot] for slot in drawing]
    draws = [row for row, samples in zip(draw_rows, numbers, strict=True) for _ in samples]
    owners = tuple((slot, len(samples)) for slot, samples in zip(drawing, numbers, strict=True))
    return SampleRows(
        logits=_to_device(draws, table),
        slots=_to_device([slot for slot, count in owners for _ in range(count)], table),
        samples=_to_device([sample for samples in numbers for sample in samples], table),
        positions=positions[_to_device([logit_rows[row] for row in draws], table)] + 1,
        owners=owners,
        num_chunk_draws=len(draws) - len(plan.decode_slots),
    )
