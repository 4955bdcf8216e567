"""The decode rows of a step: how many drafts each slot verifies, what is committed, and the drafts for the next step.

Runs on the device thread, around the model's forward pass. Without a drafter it is plain decoding: one row a slot.
"""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.protocol import LogprobColumns
from deepinfer.runtime.batch_inputs import StepInputs
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.sampling.sampler import collect_logprobs
from deepinfer.scheduler.logprob_columns import join_logprobs
from deepinfer.scheduler.step_plan import SlotOutput, StepOutput, StepPlan
from deepinfer.speculative.drafter import Drafter, Drafts
from deepinfer.speculative.verifier import Verified, Verifier, VerifyRows
from deepinfer.speculative.verify_planner import share_budget

BAD_NUMBERS = "the model's output has unusable numbers (NaN or infinite logits)"


class Speculation:
    """Verifies and drafts for the slots of one table."""

    def __init__(self, table: SlotTable, *, drafter: Drafter | None, verifier: Verifier) -> None:
        """`drafter` None: nothing is ever drafted."""
        self._table = table
        self._drafter = drafter
        self._verifier = verifier

    def num_drafts(self, plan: StepPlan) -> torch.Tensor:
        """Return int64 [decode slots]: drafts that each runs beside its anchor; -1 where a sequence has ended."""
        table = self._table
        slots = torch.from_numpy(plan.decode_slots.astype(np.int64)).to(table.device)
        room = table.room_for_drafts(slots)
        if plan.draft_budget is None or len(slots) == 0:
            return room
        return share_budget(table.confidence[slots], room, plan.draft_budget)

    def commit(self, logits: torch.Tensor, step: StepInputs, plan: StepPlan) -> tuple[SlotOutput, ...]:
        """Verify the decode rows of a step's `logits` and commit; return one output per slot, in plan order."""
        if step.verify is None:
            return tuple(SlotOutput(slot, np.zeros(0, np.int32)) for slot in plan.decode_slots.tolist())
        table, rows, logits = self._table, step.verify, logits[step.first_verify_logit :]
        verified = self._verifier.verify(logits, rows, table.sampling)
        table.commit(rows.slots, verified.token_ids, verified.num_accepted + 1)
        outputs = dict(zip(step.decode_slots, self._slot_outputs(logits, rows, verified), strict=True))
        ended = np.zeros(0, np.int32)
        return tuple(outputs.get(slot) or SlotOutput(slot, ended) for slot in plan.decode_slots.tolist())

    def draft(self, step: StepInputs, plan: StepPlan, output: StepOutput) -> None:
        """Draft behind what was committed and put a copy into `output`; a rank without rows joins with an inert one."""
        if self._drafter is None:
            return
        table, slots = self._table, list(step.decode_slots) or [0]
        device_slots = torch.tensor(slots, dtype=torch.int64, device=table.device)
        drafts = self._drafter.draft(table.anchors(slots, device_slots))
        if not step.decode_slots:
            return
        table.put_drafts(device_slots, drafts)
        places = np.flatnonzero(np.isin(plan.decode_slots, slots))
        _copy_out(drafts, places, len(plan.decode_slots), output)

    def _slot_outputs(self, logits: torch.Tensor, rows: VerifyRows, verified: Verified) -> list[SlotOutput]:
        columns = self._logprobs(logits, rows, verified)
        token_ids = verified.token_ids.cpu().numpy().astype(np.int32)
        drafted, accepted = rows.num_drafts.tolist(), verified.num_accepted.tolist()
        failed = verified.failed.tolist()
        return [
            SlotOutput(slot, np.zeros(0, np.int32), failure=BAD_NUMBERS)
            if failed[place]
            else SlotOutput(
                slot,
                token_ids[place, : accepted[place] + 1],
                columns[place],
                num_drafted=drafted[place],
                num_accepted=accepted[place],
            )
            for place, slot in enumerate(rows.slots.tolist())
        ]

    def _logprobs(self, logits: torch.Tensor, rows: VerifyRows, verified: Verified) -> list[LogprobColumns | None]:
        """Columns of each sequence's committed tokens, where asked for."""
        state = self._table.sampling
        if not state.num_logprobs:
            return [None] * len(rows.slots)
        steps = torch.arange(verified.rows.shape[1], device=logits.device)
        committed = steps <= verified.num_accepted[:, None]
        sequence = committed.nonzero()[:, 0]
        found = iter(
            collect_logprobs(
                logits[verified.rows[committed]],
                verified.token_ids[committed],
                verified.failed[sequence],
                rows.slots[sequence],
                state,
            )
        )
        runs = [[next(found) for _ in range(count + 1)] for count in verified.num_accepted.tolist()]
        known = [[column for column in run if column is not None] for run in runs]
        return [join_logprobs(run) if run else None for run in known]


def _copy_out(drafts: Drafts, places: np.ndarray, num_slots: int, output: StepOutput) -> None:
    num_drafts = drafts.token_ids.shape[1]
    output.draft_ids = np.zeros((num_slots, num_drafts), np.int32)
    output.draft_ids[places] = drafts.token_ids.cpu().numpy()
    output.confidence = np.zeros((num_slots, num_drafts), np.float32)
    output.confidence[places] = drafts.confidence.cpu().numpy()
