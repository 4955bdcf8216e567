"""The table of all metrics, and the interface through which code counts.

The table is the only source of names: the Ray exporter and the Grafana dashboard are made from it. Every metric is
tagged `role` and `rank` by the exporter; `tags` lists further ones. A metric of a feature that is not built yet
stands in the table with that feature, and nobody may record it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as Prometheus sees it. `buckets` only for histograms. `waits_for`: the feature that will record it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    tags: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    waits_for: str = ""


_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

METRICS: tuple[Metric, ...] = (
    Metric("deepinfer_requests_waiting", "gauge", "requests", "Requests that wait for a rank"),
    Metric("deepinfer_requests_running", "gauge", "requests", "Requests or sequences in work"),
    Metric("deepinfer_requests_finished", "counter", "requests", "Requests answered"),
    Metric("deepinfer_requests_failed", "counter", "requests", "Requests that ended with an error"),
    Metric("deepinfer_requests_preempted", "counter", "requests", "Sequences handed back for lack of blocks"),
    Metric("deepinfer_prompt_tokens", "counter", "tokens", "Prompt tokens run through prefill"),
    Metric(
        "deepinfer_cached_tokens",
        "counter",
        "tokens",
        "Prompt tokens served from the prefix cache",
        waits_for="prefix caching",
    ),
    Metric("deepinfer_generated_tokens", "counter", "tokens", "Tokens committed"),
    Metric(
        "deepinfer_fallback_tokens", "counter", "tokens", "Tokens drawn without their request's rules, which left none"
    ),
    Metric("deepinfer_drafted_tokens", "counter", "tokens", "Draft tokens verified"),
    Metric("deepinfer_accepted_tokens", "counter", "tokens", "Draft tokens accepted"),
    Metric("deepinfer_step_seconds", "histogram", "seconds", "Device time of a step", ("phase",), _STEP_BUCKETS),
    Metric("deepinfer_device_idle_share", "gauge", "ratio", "Share of the time between steps with work, device idle"),
    Metric("deepinfer_kv_blocks_used", "gauge", "blocks", "Cache blocks in use", ("group",)),
    Metric("deepinfer_kv_blocks_total", "gauge", "blocks", "Cache blocks of the rank", ("group",)),
    Metric(
        "deepinfer_expert_imbalance",
        "gauge",
        "ratio",
        "Tokens per expert, largest over mean",
        waits_for="expert balancing",
    ),
    Metric("deepinfer_kv_transfer_bytes", "counter", "bytes", "Bytes of KV handed over"),
    Metric("deepinfer_kv_transfer_seconds", "counter", "seconds", "Time spent gathering and scattering KV"),
    Metric(
        "deepinfer_handovers", "counter", "prompts", "Prompts handed over, on the device or through the host", ("way",)
    ),
    Metric("deepinfer_kv_bytes_in_flight", "gauge", "bytes", "Hand-overs between prefill and decode"),
    Metric("deepinfer_rank_restarts", "counter", "restarts", "Rank groups started again after a failure"),
    Metric("deepinfer_driver_answers", "counter", "calls", "Results received from ranks"),
)
RECORDED: tuple[Metric, ...] = tuple(metric for metric in METRICS if not metric.waits_for)


class Recorder(Protocol):
    """Where code counts. Calls are cheap: an exporter gathers and pushes at its own pace."""

    def add(self, name: str, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add to a counter."""
        ...

    def set(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Put one value into a histogram."""
        ...


class MemoryRecorder:
    """A recorder that keeps plain totals in the process, where no exporter runs: that is in tests."""

    def __init__(self) -> None:
        """Start with nothing recorded; unknown names are refused on use."""
        self._known = {metric.name: metric for metric in RECORDED}
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, name: str, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add to a counter."""
        key = self._key(name, "counter", tags)
        self.values[key] = self.values.get(key, 0.0) + value

    def set(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Set a gauge."""
        self.values[self._key(name, "gauge", tags)] = value

    def observe(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Keep the sum of a histogram."""
        key = self._key(name, "histogram", tags)
        self.values[key] = self.values.get(key, 0.0) + value

    def get(self, name: str, tags: Mapping[str, str] | None = None) -> float:
        """Return what was recorded, 0.0 if nothing."""
        return self.values.get((name, tuple(sorted((tags or {}).items()))), 0.0)

    def _key(self, name: str, kind: str, tags: Mapping[str, str] | None) -> tuple[str, tuple[tuple[str, str], ...]]:
        metric = self._known.get(name)
        assert metric is not None, f"metric {name} is not in the table of what is recorded"
        assert metric.kind == kind, f"metric {name} is a {metric.kind}, used as a {kind}"
        assert set(tags or {}) == set(metric.tags), f"metric {name} has tags {metric.tags}, got {tags}"
        return name, tuple(sorted((tags or {}).items()))
