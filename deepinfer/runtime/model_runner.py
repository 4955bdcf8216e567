"""Runs one step on the device: slot table, forward, sampling, commit. Every method here runs on the device thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.model_spec import KVPart, Model
from deepinfer.protocol import LogprobColumns
from deepinfer.runtime.batch_inputs import SampleRows, StepInputs, build_inputs
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.speculation import BAD_NUMBERS, Speculation
from deepinfer.sampling.logprobs import prompt_logprobs
from deepinfer.sampling.sampler import Sampled, sample, unusable_rows
from deepinfer.scheduler.logprob_columns import join_logprobs
from deepinfer.scheduler.step_plan import Int32Array, SlotOutput, StepOutput, StepPlan
from deepinfer.structured_outputs.bitmask import StepMasks


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
    ) -> None:
        """Take over what the builder made; nothing else may use it from here on."""
        self._model = model
        self._caches = caches
        self._table = table
        self._kernels = kernels
        self._dispatcher = dispatcher
        self._speculation = speculation
        self._started: tuple[StepInputs, torch.Tensor] | None = None

    @property
    def max_drafts(self) -> int:
        """Most drafts of a slot in a step."""
        return self._table.max_drafts

    def start_step(self, plan: StepPlan) -> None:
        """Apply admissions and grants and run the rows; `finish_step` of the same plan comes next."""
        assert self._started is None, "the step before has not been finished"
        with torch.inference_mode():
            for admission in plan.admissions:
                self._table.admit(admission)
            for grant in plan.grants:
                self._table.grant(grant)
            step = build_inputs(
                plan,
                self._table,
                num_drafts=self._speculation.num_drafts(plan),
                caches=self._caches,
                kernels=self._kernels,
                dispatcher=self._dispatcher,
            )
            self._started = step, self._model.forward(step.forward).logits

    def finish_step(self, plan: StepPlan, masks: StepMasks | None) -> StepOutput:
        """Draw tokens within what `masks` allow and leave them in the table as the next input; then draft."""
        assert self._started is not None, "the step has not been started"
        (step, logits), self._started = self._started, None
        with torch.inference_mode():
            self._table.sampling.masks = None if masks is None else masks.to(self._table.device)
            output = StepOutput(plan.step_id, prompt_logprobs=self._prompt_logprobs(logits, step))
            output.slots = (*self._draw(logits, step.samples), *self._speculation.commit(logits, step, plan))
            self._speculation.draft(step, plan, output)
            return output

    def export_kv(self, *, slot: int, block_ids: dict[str, Int32Array], num_tokens: int) -> tuple[KVPart, ...]:
        """Copy a sequence's KV out of the caches."""
        with torch.inference_mode():
            return self._model.export_kv(
                self._caches, slot=slot, block_ids=self._device_blocks(block_ids), num_tokens=num_tokens
            )

    def import_kv(
        self, *, slot: int, block_ids: dict[str, Int32Array], num_tokens: int, parts: tuple[KVPart, ...]
    ) -> None:
        """Write a sequence's KV into the caches."""
        with torch.inference_mode():
            self._model.import_kv(
                self._caches, slot=slot, block_ids=self._device_blocks(block_ids), num_tokens=num_tokens, parts=parts
            )

    def _draw(self, logits: torch.Tensor, rows: SampleRows) -> tuple[SlotOutput, ...]:
        """Draw the first tokens of finished prompts. They go on elsewhere, so nothing is committed here."""
        if not rows.owners:
            return ()
        sampled = sample(
            logits[rows.logits],
            slots=rows.slots,
            samples=rows.samples,
            positions=rows.positions,
            token_table=self._table.token_table,
            state=self._table.sampling,
        )
        return _slot_outputs(sampled, rows, self._table.unusable)

    def _prompt_logprobs(self, all_logits: torch.Tensor, step: StepInputs) -> dict[int, LogprobColumns]:
        columns = {}
        for prompt in step.prompts:
            logits = all_logits[prompt.first_logit : prompt.first_logit + prompt.num_rows]
            end = prompt.first_position + prompt.num_rows
            next_ids = self._table.token_table[prompt.slot, prompt.first_position : end].to(torch.int64)
            if unusable_rows(logits).any():
                self._table.unusable.add(prompt.slot)
            columns[prompt.slot] = prompt_logprobs(logits, next_ids, self._table.prompt_logprobs[prompt.slot])
        return columns

    def _device_blocks(self, block_ids: dict[str, Int32Array]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(ids.astype(np.int64)).to(self._table.device) for name, ids in block_ids.items()}


def _slot_outputs(sampled: Sampled, rows: SampleRows, unusable: set[int]) -> tuple[SlotOutput, ...]:
    """Bring the draws to the host, one entry per owner; those in `unusable` have failed before."""
    token_ids = sampled.token_ids.cpu().numpy().astype(np.int32)
    failed = sampled.failed.cpu().numpy()
    outputs = []
    end = 0
    for slot, num_draws in rows.owners:
        start, end = end, end + num_draws
        if slot in unusable or failed[start:end].any():
            outputs.append(SlotOutput(slot, np.zeros(0, np.int32), failure=BAD_NUMBERS))
            continue
        columns = [column for column in sampled.logprobs[start:end] if column is not None]
        outputs.append(SlotOutput(slot, token_ids[start:end], join_logprobs(columns) if columns else None))
    return tuple(outputs)
