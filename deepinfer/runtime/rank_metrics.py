"""A rank's metrics, counted where the step thread learns of things."""

from __future__ import annotations

from typing import Final

from deepinfer.metrics import Recorder
from deepinfer.protocol import FinishCode
from deepinfer.scheduler.step_plan import StepPlan
from deepinfer.scheduler.step_results import SchedulerLoad, StepResults


class RankMetrics:
    """Writes into a recorder; `num_blocks` per paged group are those that sequences can take."""

    def __init__(self, recorder: Recorder, *, role: str, num_blocks: dict[str, int]) -> None:
        """Record the totals."""
        self._recorder = recorder
        self._phase: Final = {"phase": role}
        self._num_blocks = num_blocks
        for group, total in num_blocks.items():
            recorder.set("deepinfer_kv_blocks_total", total, {"group": group})

    def count_step(
        self, plan: StepPlan, results: StepResults, *, load: SchedulerLoad, seconds: float, idle_share: float
    ) -> None:
        """Count an applied step that took `seconds` on the device."""
        recorder = self._recorder
        recorder.observe("deepinfer_step_seconds", seconds, self._phase)
        recorder.set("deepinfer_device_idle_share", idle_share)
        recorder.set("deepinfer_requests_waiting", load.num_waiting)
        recorder.set("deepinfer_requests_running", load.num_running)
        for group, free in load.num_free_blocks.items():
            recorder.set("deepinfer_kv_blocks_used", self._num_blocks[group] - free, {"group": group})
        recorder.add("deepinfer_prompt_tokens", sum(chunk.num_tokens for chunk in plan.chunks))
        generated = sum(len(item.token_ids) for item in results.decoded)
        generated += sum(len(item.first_token_ids) for item in results.prefilled)
        recorder.add("deepinfer_generated_tokens", generated)
        fell_back = sum(item.num_fell_back for item in results.decoded)
        fell_back += sum(item.num_fell_back for item in results.prefilled)
        recorder.add("deepinfer_fallback_tokens", fell_back)
        recorder.add("deepinfer_drafted_tokens", sum(item.num_drafted for item in results.decoded))
        recorder.add("deepinfer_accepted_tokens", sum(item.num_accepted for item in results.decoded))
        preempted = sum(item.finish is FinishCode.PREEMPTED for item in results.decoded)
        recorder.add("deepinfer_requests_preempted", preempted)

    def count_transfer(self, *, num_bytes: int, seconds: float) -> None:
        """Count KV that was gathered or scattered."""
        self._recorder.add("deepinfer_kv_transfer_bytes", num_bytes)
        self._recorder.add("deepinfer_kv_transfer_seconds", seconds)

    def count_handover(self, *, on_device: bool) -> None:
        """Count a prompt whose KV is on offer to a decode rank."""
        self._recorder.add("deepinfer_handovers", 1, {"way": "device" if on_device else "host"})
