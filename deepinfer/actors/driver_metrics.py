"""The driver's metrics, made of the scheduler's counts."""

from __future__ import annotations

from deepinfer.actors.ray_metrics import RayRecorder
from deepinfer.scheduler.request_book import SchedulerCounts


class DriverMetrics:
    """Exports gauges as they are, and totals as what was added since the last export."""

    def __init__(self, interval_seconds: float) -> None:
        """Register the metrics for role "driver"."""
        self._recorder = RayRecorder(role="driver", rank=0, interval_seconds=interval_seconds)
        self._exported: dict[str, int] = {}
        self.num_answers = 0

    def count_restart(self) -> None:
        """A group was started again."""
        self._recorder.add("deepinfer_rank_restarts")

    def export(self, counts: SchedulerCounts) -> None:
        """Record `counts` and push them."""
        self._recorder.set("deepinfer_requests_waiting", counts.num_waiting)
        running = counts.num_prefilling + counts.num_prefilled + counts.num_decoding
        self._recorder.set("deepinfer_requests_running", running)
        self._recorder.set("deepinfer_kv_bytes_in_flight", counts.kv_bytes_in_flight)
        totals = {
            "deepinfer_requests_finished": counts.num_finished,
            "deepinfer_requests_failed": counts.num_failed,
            "deepinfer_driver_answers": self.num_answers,
        }
        for name, total in totals.items():
            self._recorder.add(name, total - self._exported.get(name, 0))
            self._exported[name] = total
        self._recorder.push()
