"""A recorder on Ray's metrics: values are gathered in the process and pushed at a bounded pace.

Ray exports every recorded metric of the table under its name with `ray_` in front.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from deepinfer.metrics import RECORDED, Metric

_Key = tuple[str, tuple[tuple[str, str], ...]]


class RayRecorder:
    """Counts for one rank (or the driver, as role "driver"). Thread-safe; `push` is called by the owner's loop."""

    def __init__(self, *, role: str, rank: int, interval_seconds: float) -> None:
        """Register all metrics of the table with the tags `role` and `rank`."""
        self._interval = interval_seconds
        self._last_push = time.monotonic()
        self._lock = threading.Lock()
        self._metrics = {metric.name: metric for metric in RECORDED}
        self._exporters = {metric.name: _exporter(metric, {"role": role, "rank": str(rank)}) for metric in RECORDED}
        self._counts: dict[_Key, float] = {}
        self._values: dict[_Key, float] = {}
        self._observations: list[tuple[_Key, float]] = []

    def add(self, name: str, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add to a counter."""
        key = self._key(name, "counter", tags)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0.0) + value

    def set(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Set a gauge."""
        key = self._key(name, "gauge", tags)
        with self._lock:
            self._values[key] = value

    def observe(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Put one value into a histogram."""
        key = self._key(name, "histogram", tags)
        with self._lock:
            self._observations.append((key, value))

    def push(self) -> None:
        """Hand to Ray what was counted since the last push, and every gauge; not sooner than after the interval."""
        now = time.monotonic()
        if now - self._last_push < self._interval:
            return
        self._last_push = now
        with self._lock:
            counts, self._counts = self._counts, {}
            values = dict(self._values)  # all of them: Ray's agent forgets a gauge that was not set since its last look
            observations, self._observations = self._observations, []
        for (name, tags), value in counts.items():
            if value > 0:
                self._exporters[name].inc(value, dict(tags))
        for (name, tags), value in values.items():
            self._exporters[name].set(value, dict(tags))
        for (name, tags), value in observations:
            self._exporters[name].observe(value, dict(tags))

    def _key(self, name: str, kind: str, tags: Mapping[str, str] | None) -> _Key:
        metric = self._metrics.get(name)
        assert metric is not None, f"metric {name} is not in the table of what is recorded"
        assert metric.kind == kind, f"metric {name} is a {metric.kind}, used as a {kind}"
        assert set(tags or {}) == set(metric.tags), f"metric {name} has tags {metric.tags}, got {tags}"
        return name, tuple(sorted((tags or {}).items()))


def _exporter(metric: Metric, tags: dict[str, str]) -> Counter | Gauge | Histogram:
    keys = ("role", "rank", *metric.tags)
    exporter: Counter | Gauge | Histogram
    if metric.kind == "counter":
        exporter = Counter(metric.name, description=metric.help, tag_keys=keys)
    elif metric.kind == "gauge":
        exporter = Gauge(metric.name, description=metric.help, tag_keys=keys)
    else:
        exporter = Histogram(metric.name, description=metric.help, boundaries=list(metric.buckets), tag_keys=keys)
    exporter.set_default_tags(tags)
    return exporter
