"""Runs one step on the device: slot table, forward, sampling, commit. What touches the device runs on its thread.

Nothing in it waits for the device: what the host has to learn is copied to it, and read when the step has ended.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.model_spec import KVPart, Model
from deepinfer.platforms.transfer import to_device, to_host
from deepinfer.runtime.batch_inputs import (
    ChunkLogits,
    DecodeRows,
    StepInputs,
    Surroundings,
    build_decode_inputs,
    build_inputs,
    chunk_columns,
    chunk_logits,
    draw_rows,
    own_rows,
)
from deepinfer.runtime.pending_output import (
    PendingDraws,
    PendingOutput,
    PendingPrompt,
    PendingRows,
    pending_draws,
    pending_rows,
)
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.speculation import Committed, Speculation
from deepinfer.runtime.step_graphs import Capture, StepGraphs
from deepinfer.runtime.step_upload import send_together
from deepinfer.sampling.logprobs import rank_tokens
from deepinfer.sampling.sampler import sample, unusable_rows
from deepinfer.scheduler.step_plan import Int32Array, StepPlan
from deepinfer.speculative.drafter import Drafts
from deepinfer.structured_outputs.bitmask import StepMasks

_Whole = tuple[Committed, Drafts | None]


@dataclass(slots=True, frozen=True)
class _Started:
    """A step whose rows run. Either its `logits` are there, or all of it ran as one graph: then `whole` is.

    `graph_rows`: the decode rows of a step that runs as graphs.
    """

    sent: dict[str, torch.Tensor]
    chunks: ChunkLogits
    max_position: int
    step: StepInputs | None = None
    logits: torch.Tensor | None = None
    graph_rows: DecodeRows | None = None
    whole: _Whole | None = None


class ModelRunner:
    """A loaded model with its caches and its slot table."""

    def __init__(
        self,
        *,
        model: Model,
        caches: Any,
        table: SlotTable,
        kernels: KernelSet,
        dispatcher: TokenDispatcher,
        speculation: Speculation,
        capture: Capture | None = None,
    ) -> None:
        """Take over what the builder made; nothing else may use it from here on.

        With `capture`, that of the platform, decode steps run as graphs, where dispatcher and model let them.
        """
        self._model = model
        self._caches = caches
        self._table = table
        self._around = Surroundings(table, caches, kernels, dispatcher)
        self._speculation = speculation
        self._started: _Started | None = None
        self._unusable: set[int] = set()
        self._graphs: StepGraphs | None = None
        # of recorded steps that end with their logits, which the largest and the smallest leave in the same place
        self._logits = torch.empty(0, table.sampling.vocab_size, device=table.device)
        if capture is not None and dispatcher.capturable and model.capturable:
            max_sequences, max_drafts = len(table.num_tokens) - 1, table.max_drafts
            self._graphs = StepGraphs(capture, max_sequences=max_sequences, max_drafts=max_drafts, device=table.device)
            self._logits = torch.empty(max_sequences * (1 + max_drafts), table.sampling.vocab_size, device=table.device)

    @property
    def max_drafts(self) -> int:
        """Most drafts of a slot in a step."""
        return self._table.max_drafts

    @property
    def kept_bytes(self) -> int:
        """What it keeps on the device beside the slot table and the caches."""
        return self._logits.nbytes

    def record_graphs(self) -> None:
        """Record the largest decode step, so that its memory is taken before others want it; the rest on first use."""
        if self._graphs is not None and self._speculation.capturable:
            with torch.inference_mode():
                self._graphs.record_largest("whole", self._run_whole)

    def run_padding(self, num_sequences: int, num_rows: int, *, num_logits: int | None = None) -> None:
        """Run a step of that size whose rows are all padding, to see what it needs.

        It is a decode step, or, with `num_logits`, one of prompts that wants as many logits.
        """
        slots = torch.zeros(num_sequences, dtype=torch.int64, device=self._table.device)
        decode = DecodeRows(slots, torch.full_like(slots, -1), num_rows)
        with torch.inference_mode():
            if num_logits is None:
                self._run_whole(decode)
            else:
                step = build_decode_inputs(self._around, decode).forward
                wanted = torch.arange(num_logits, device=slots.device)
                self._model.forward(replace(step, logit_rows=wanted))

    def start_step(self, plan: StepPlan) -> None:
        """Apply admissions and grants and run the rows; `finish_step` of the same plan comes next."""
        assert self._started is None, "the step before has not been finished"
        table = self._table
        with torch.inference_mode():
            columns = table.describe(plan)
            chunks = chunk_logits(plan, table)
            columns |= chunk_columns(plan, chunks, table) | {"decode slots": plan.decode_slots}
            sent = send_together(columns, table.device)
            table.apply(plan, sent)
            max_position = table.note_step(plan.decode_slots.tolist())
            decode = self._decode_rows(plan, sent["decode slots"])
            if decode is not None and not plan.chunks and self._graphs is not None:
                self._started = self._start_graph(plan, sent, chunks, max_position, decode, self._graphs)
            else:
                step = build_inputs(plan, self._around, sent, decode)
                self._started = _Started(sent, chunks, max_position, step, self._forward(step))

    def finish_step(self, plan: StepPlan, masks: StepMasks | None) -> PendingOutput:
        """Draw tokens within what `masks` allow and leave them in the table as the next input; then draft."""
        assert self._started is not None, "the step has not been started"
        started, self._started = self._started, None
        with torch.inference_mode():
            if started.whole is not None:
                assert masks is None, "a step of slots with grammars does not run as one graph"
                return PendingOutput(plan, self._unusable, rows=pending_rows(*started.whole, None))
            assert started.step is not None, "neither logits nor tokens"
            assert started.logits is not None, "neither logits nor tokens"
            self._table.sampling.masks = None if masks is None else masks.to(self._table.device)
            output = PendingOutput(
                plan,
                self._unusable,
                draws=self._draw(started, started.logits),
                prompts=tuple(self._rank_prompts(started, started.logits)),
                rows=self._commit(plan, started, started.step, started.logits),
            )
            self._table.sampling.masks = None  # the next step may be recorded: it would apply them for ever
            return output

    def kv_bytes(self, num_tokens: int) -> int:
        """How long the KV of so many tokens is; any thread."""
        return self._model.kv_bytes(self._caches, num_tokens)

    def export_kv(
        self, *, slot: int, block_ids: dict[str, Int32Array], num_tokens: int, into: torch.Tensor | None = None
    ) -> tuple[KVPart, ...]:
        """Copy a sequence's KV out of the caches: into memory of the device, or with None into the host's."""
        with torch.inference_mode():
            return self._model.export_kv(
                self._caches, slot=slot, block_ids=self._device_blocks(block_ids), num_tokens=num_tokens, into=into
            )

    def import_kv(
        self, *, slot: int, block_ids: dict[str, Int32Array], num_tokens: int, parts: tuple[KVPart, ...]
    ) -> None:
        """Write a sequence's KV into the caches."""
        with torch.inference_mode():
            self._model.import_kv(
                self._caches, slot=slot, block_ids=self._device_blocks(block_ids), num_tokens=num_tokens, parts=parts
            )

    def _decode_rows(self, plan: StepPlan, slots: torch.Tensor) -> DecodeRows | None:
        if len(plan.decode_slots) == 0:
            return None
        num_drafts = self._speculation.num_drafts(slots, plan.draft_budget)
        return DecodeRows(slots, num_drafts, self._speculation.max_rows(len(slots), plan.draft_budget))

    def _start_graph(
        self,
        plan: StepPlan,
        sent: dict[str, torch.Tensor],
        chunks: ChunkLogits,
        max_position: int,
        decode: DecodeRows,
        graphs: StepGraphs,
    ) -> _Started:
        """Run the step as one graph or, if a slot wants more than a plain draw, up to its logits."""
        state = self._table.sampling
        wishes = (state.rules, state.truncating, state.num_logprobs, self._table.with_grammar)
        if self._speculation.capturable and not _any_in(plan, *wishes):
            if plan.is_drafting:
                whole = graphs.run("whole", self._run_whole, decode)
            else:
                whole = graphs.run("without drafting", self._run_without_drafting, decode)
            return _Started(sent, chunks, max_position, whole=whole)
        step, logits = graphs.run("rows", self._run_kept_rows, decode)
        return _Started(sent, chunks, max_position, step, logits, decode)

    def _run_kept_rows(self, decode: DecodeRows) -> tuple[StepInputs, torch.Tensor]:
        """As `_run_rows`, with logits that take no memory of the graph: each would keep its own for good."""
        step, logits = self._run_rows(decode)
        return step, self._logits[: len(logits)].copy_(logits)

    def _run_rows(self, decode: DecodeRows) -> tuple[StepInputs, torch.Tensor]:
        step = build_decode_inputs(self._around, decode)
        return step, self._forward(step)

    def _run_whole(self, decode: DecodeRows) -> _Whole:
        return self._run_committed(decode), self._run_draft(decode)

    def _run_without_drafting(self, decode: DecodeRows) -> _Whole:
        return self._run_committed(decode), None

    def _run_committed(self, decode: DecodeRows) -> Committed:
        step, logits = self._run_rows(decode)
        assert step.verify is not None, "decode rows"
        return self._speculation.commit(logits, step.verify, step.decode_slots)

    def _run_draft(self, decode: DecodeRows) -> Drafts | None:
        return self._speculation.draft(decode.slots)

    def _forward(self, step: StepInputs) -> torch.Tensor:
        return self._model.forward(step.forward).logits

    def _draw(self, started: _Started, logits: torch.Tensor) -> PendingDraws | None:
        """Draw the first tokens of finished prompts. They go on elsewhere, so nothing is committed here."""
        if not started.chunks.draws:
            return None
        rows = draw_rows(started.chunks, started.sent, self._table)
        sampled = sample(logits[started.sent["draw logits"]], rows, self._table.sampling)
        return pending_draws(sampled, tuple(chunk for _, chunk in started.chunks.draws))

    def _rank_prompts(self, started: _Started, all_logits: torch.Tensor) -> list[PendingPrompt]:
        pending = []
        for prompt in started.chunks.prompts:
            logits = all_logits[prompt.first_logit : prompt.first_logit + prompt.num_rows]
            end = prompt.first_position + prompt.num_rows
            next_ids = self._table.token_table[prompt.slot, prompt.first_position : end].to(torch.int64)
            num_top = self._table.prompt_logprobs[prompt.slot]
            ranked = rank_tokens(logits, next_ids, num_top)
            failed = to_host(unusable_rows(logits))
            pending.append(PendingPrompt(prompt.slot, num_top, prompt.num_rows, ranked, failed))
        return pending

    def _commit(
        self, plan: StepPlan, started: _Started, step: StepInputs, all_logits: torch.Tensor
    ) -> PendingRows | None:
        if step.verify is None:
            if plan.is_drafting:
                self._speculation.draft(step.decode_slots)
            return None
        logits = all_logits[step.first_verify_logit :]
        verify = own_rows(step.verify, plan.decode_slots.tolist(), started.max_position)
        committed = self._speculation.commit(logits, verify, step.decode_slots)
        logprobs = self._speculation.logprobs(logits, verify, committed)
        return pending_rows(committed, self._draft(plan, started, step), logprobs)

    def _draft(self, plan: StepPlan, started: _Started, step: StepInputs) -> Drafts | None:
        """Draft as a graph if the step's rows ran as one, unless a slot truncates: then its drafts do, too."""
        if not plan.is_drafting:
            return None
        speculation = self._speculation
        is_plain = speculation.capturable and not _any_in(plan, self._table.sampling.truncating)
        if self._graphs is not None and started.graph_rows is not None and is_plain and speculation.is_drafting:
            drafts: Drafts | None = self._graphs.run("drafts", self._run_draft, started.graph_rows)
            return drafts
        return speculation.draft(step.decode_slots, tuple(plan.decode_slots.tolist()))

    def _device_blocks(self, block_ids: dict[str, Int32Array]) -> dict[str, torch.Tensor]:
        return {name: to_device(ids.astype(np.int64), self._table.device) for name, ids in block_ids.items()}


def _any_in(plan: StepPlan, *parts: Container[int]) -> bool:
    """Whether a decode slot of `plan` is in one of `parts`."""
    return any(slot in part for slot in plan.decode_slots.tolist() for part in parts)
