"""From a step plan and the slot table to what a forward pass and the sampler read.

The plan knows which slots run; how many rows each has and which positions and tokens they hold is worked out on the
device from the slot table, because the results of the step before may not have reached the host yet. So the host gives
upper bounds: rows and sequences that turn out not to exist are padding, and no shape depends on what the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.registry import KernelSet
from deepinfer.kernels.step_ops import RowLayout
from deepinfer.models.model_spec import ForwardInputs, Prompts
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.step_upload import Column
from deepinfer.sampling.rows import TokenRows
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
class ChunkLogits:
    """Which rows of a step's chunks give logits, on the host.

    `rows`: in order, rows of the step. `draws`: for each draw of a sampling chunk, one per sample, the place of its
    logits in `rows` and its chunk.
    """

    rows: list[int]
    prompts: tuple[PromptRows, ...]
    draws: tuple[tuple[int, PrefillChunk], ...]


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """The decode slots of a step on the device: `slots` [S] int64, 0 behind the last, and how many drafts each runs.

    `num_drafts` [S] int64: beside its anchor; -1: no rows at all. They have `num_rows` rows in all at most.
    """

    slots: torch.Tensor
    num_drafts: torch.Tensor
    num_rows: int


@dataclass(slots=True, frozen=True)
class StepInputs:
    """A step, ready to run. `verify`: the decode slots, `decode` their slots on the device; None if there are none.

    Their logits are the last ones, from `first_verify_logit` on.
    """

    forward: ForwardInputs
    verify: VerifyRows | None
    decode_slots: torch.Tensor
    first_verify_logit: int


@dataclass(slots=True, frozen=True)
class Surroundings:
    """What every forward pass of a rank is given."""

    table: SlotTable
    caches: Any
    kernels: KernelSet
    dispatcher: TokenDispatcher


def chunk_logits(plan: StepPlan, table: SlotTable) -> ChunkLogits:
    """Choose the rows of chunks whose logits are wanted: known prompt tokens, and the last row of a sampling chunk."""
    rows: list[int] = []
    prompts: list[PromptRows] = []
    draws: list[tuple[int, PrefillChunk]] = []
    first_row = 0
    for chunk in plan.chunks:
        num_known = _num_prompt_rows(chunk, table)
        if num_known > 0:
            prompts.append(PromptRows(chunk.slot, len(rows), num_known, chunk.start_position + 1))
            rows += range(first_row, first_row + num_known)
        first_row += chunk.num_tokens
        if chunk.samples:
            draws += [(len(rows), chunk)] * len(table.sampling.draw_seeds[chunk.slot])
            rows.append(first_row - 1)
    return ChunkLogits(rows, tuple(prompts), tuple(draws))


def chunk_columns(plan: StepPlan, logits: ChunkLogits, table: SlotTable) -> dict[str, Column]:
    """Return what `build_inputs` and `draw_rows` need of the chunks of `plan` on the device."""
    if not plan.chunks:
        return {}
    seeds = [seed for chunk in plan.chunks if chunk.samples for seed in table.sampling.draw_seeds[chunk.slot]]
    return {
        "chunk slots": np.array([chunk.slot for chunk in plan.chunks]),
        "chunk starts": np.array([chunk.start_position for chunk in plan.chunks]),
        "chunk lengths": np.array([chunk.num_tokens for chunk in plan.chunks]),
        "chunk logits": np.array(logits.rows, np.int64),
        "draw logits": np.array([place for place, _ in logits.draws], np.int64),
        "draw slots": np.array([chunk.slot for _, chunk in logits.draws], np.int64),
        "draw seeds": np.array(seeds, np.int64),
        "draw positions": np.array([_end(chunk) for _, chunk in logits.draws], np.int64),
    }


def build_inputs(
    plan: StepPlan, around: Surroundings, sent: dict[str, torch.Tensor], decode: DecodeRows | None
) -> StepInputs:
    """Lay out the chunks of `plan`, then the rows of `decode`. A step without any is one padding row in slot 0."""
    table = around.table
    chunks = [sent.get(f"chunk {name}") for name in ("slots", "starts", "lengths")]
    num_chunk_rows = sum(chunk.num_tokens for chunk in plan.chunks)
    num_rows = num_chunk_rows + (decode.num_rows if decode else 0)
    layout = _lay_out(around, chunks, decode, max(1, num_rows))
    host_slots = [chunk.slot for chunk in plan.chunks] + plan.decode_slots.tolist()
    forward = _forward_inputs(around, layout, table.block_rows(layout.slots, host_slots))
    logit_rows, nothing = None, torch.zeros(0, dtype=torch.int64, device=table.device)
    if plan.chunks:
        logit_rows = torch.cat((sent["chunk logits"], torch.arange(num_chunk_rows, num_rows, device=table.device)))
    elif not decode:
        logit_rows = nothing
    return StepInputs(
        forward=replace(
            forward,
            logit_rows=logit_rows,
            prompts=_prompts(plan, table),
        ),
        verify=_verify_rows(table, layout, decode, num_chunk_rows) if decode else None,
        decode_slots=decode.slots if decode else nothing.new_zeros(1),
        first_verify_logit=len(sent["chunk logits"]) if plan.chunks else 0,
    )


def build_decode_inputs(around: Surroundings, decode: DecodeRows) -> StepInputs:
    """`build_inputs` for a step of decode rows alone, without anything that the host knows of the slots.

    A graph may hold it: what it reads stays in the same tensors.
    """
    layout = _lay_out(around, [None] * 3, decode, decode.num_rows)
    return StepInputs(
        forward=_forward_inputs(around, layout, around.table.block_rows(layout.slots, None)),
        verify=_verify_rows(around.table, layout, decode, 0),
        decode_slots=decode.slots,
        first_verify_logit=0,
    )


def draw_rows(logits: ChunkLogits, sent: dict[str, torch.Tensor], table: SlotTable) -> TokenRows:
    """Return the draws of a step's sampling chunks in plan order, one per sample; their logits: `draw logits`."""
    count = len(logits.draws)
    return TokenRows(
        slots=sent["draw slots"],
        seeds=sent["draw seeds"],
        positions=sent["draw positions"],
        token_table=table.token_table,
        owners=tuple(chunk.slot for _, chunk in logits.draws),
        by_owner=torch.arange(count, device=table.device)[:, None],
        max_position=max(_end(chunk) for _, chunk in logits.draws),
    )


def own_rows(rows: VerifyRows, slots: Sequence[int], max_position: int) -> VerifyRows:
    """Tell the host's part of `rows`: the slots of its sequences, and the largest position that they may produce."""
    return replace(rows, rows=replace(rows.rows, owners=tuple(slots), max_position=max_position))


def _lay_out(
    around: Surroundings, chunks: list[torch.Tensor | None], decode: DecodeRows | None, num_rows: int
) -> RowLayout:
    """Place sequences one after the other: chunks (their slots, starts and lengths), decode slots, then padding."""
    table = around.table
    slots, firsts, lengths = ([] if part is None else [part] for part in chunks)
    if decode:
        slots.append(decode.slots)
        firsts.append(table.read(decode.slots).positions)
        lengths.append(decode.num_drafts + 1)
    return around.kernels.lay_out_rows(
        _joined(slots, table),
        _joined(firsts, table),
        _joined(lengths, table),
        token_table=table.token_table,
        seeds=table.sampling.seeds,
        num_rows=num_rows,
        width=table.max_drafts + 1,
    )


def _joined(parts: list[torch.Tensor], table: SlotTable) -> torch.Tensor:
    """Return `parts` [n] int64 as one; a copy only where there are several."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=table.device)


def _forward_inputs(around: Surroundings, layout: RowLayout, block_tables: dict[str, torch.Tensor]) -> ForwardInputs:
    """Inputs that want the logits of all rows."""
    table = around.table
    return ForwardInputs(
        token_ids=layout.token_ids,
        positions=layout.positions,
        row_sequence=layout.sequence,
        sequence_slots=layout.slots,
        sequence_starts=layout.starts,
        block_tables=block_tables,
        token_table=table.token_table,
        logit_rows=None,
        is_padding=layout.is_padding,
        caches=around.caches,
        kernels=around.kernels,
        dispatcher=around.dispatcher,
    )


def _verify_rows(table: SlotTable, layout: RowLayout, decode: DecodeRows, first_row: int) -> VerifyRows:
    """Return the decode rows, which are those from `first_row` on; the host's part is not told yet."""
    own = layout.own_rows[len(layout.own_rows) - len(decode.slots) :]
    return VerifyRows(
        rows=TokenRows(
            slots=layout.row_slots[first_row:],
            seeds=layout.seeds[first_row:],
            positions=layout.positions[first_row:] + 1,
            token_table=table.token_table,
            owners=(),
            by_owner=own - first_row if first_row else own,
            max_position=0,
        ),
        num_drafts=decode.num_drafts,
        offsets=layout.offsets[first_row:],
        drafts=layout.drafts[first_row:],
        draft_scores=table.draft_scores,
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


def _num_prompt_rows(chunk: PrefillChunk, table: SlotTable) -> int:
    """Rows of the chunk that predict a token of the prompt, if their log-probabilities are wanted, else 0."""
    if chunk.slot not in table.prompt_logprobs:
        return 0
    return min(chunk.num_tokens, table.num_prompt_tokens[chunk.slot] - 1 - chunk.start_position)


def _end(chunk: PrefillChunk) -> int:
    return chunk.start_position + chunk.num_tokens
