"""The exporter of metrics, with stand-ins for Ray's metric classes."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.actors import ray_metrics
from deepinfer.actors.driver_metrics import DriverMetrics
from deepinfer.actors.ray_metrics import RayRecorder
from deepinfer.scheduler.request_book import SchedulerCounts

Call = tuple[str, str, float, dict[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every call that would have reached Ray: method, metric, value, all tags."""
    seen: list[Call] = []

    class Exporter:
        def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...], boundaries: Any = None) -> None:
            assert description
            self.name = name
            self.keys = tag_keys

        def set_default_tags(self, tags: dict[str, str]) -> None:
            self.tags = tags

        def __getattr__(self, method: str) -> Any:
            def record(value: float, tags: dict[str, str]) -> None:
                assert {*tags, *self.tags} == set(self.keys)
                seen.append((method, self.name, value, {**self.tags, **tags}))

            return record

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_metrics, kind, Exporter)
    return seen


def test_values_are_gathered_and_pushed_with_role_and_rank(calls: list[Call]) -> None:
    recorder = RayRecorder(role="decode", rank=3, interval_seconds=0.0)
    recorder.add("deepinfer_generated_tokens", 2)
    recorder.add("deepinfer_generated_tokens", 5)
    recorder.set("deepinfer_kv_blocks_used", 1, {"group": "main"})
    recorder.set("deepinfer_kv_blocks_used", 9, {"group": "main"})
    recorder.observe("deepinfer_step_seconds", 0.5, {"phase": "decode"})
    assert calls == []
    recorder.push()
    own = {"role": "decode", "rank": "3"}
    assert calls == [
        ("inc", "deepinfer_generated_tokens", 7, own),
        ("set", "deepinfer_kv_blocks_used", 9, {**own, "group": "main"}),
        ("observe", "deepinfer_step_seconds", 0.5, {**own, "phase": "decode"}),
    ]
    recorder.push()
    assert calls[3:] == [("set", "deepinfer_kv_blocks_used", 9, {**own, "group": "main"})], "gauges are set again"


def test_pushes_keep_their_distance(calls: list[Call]) -> None:
    recorder = RayRecorder(role="decode", rank=0, interval_seconds=3600.0)
    recorder.add("deepinfer_generated_tokens", 2)
    recorder.push()
    assert calls == []


def test_wrong_names_kinds_and_tags_are_faults(calls: list[Call]) -> None:
    recorder = RayRecorder(role="decode", rank=0, interval_seconds=0.0)
    with pytest.raises(AssertionError, match="not in the table"):
        recorder.add("deepinfer_tokens")
    with pytest.raises(AssertionError, match="is a counter"):
        recorder.set("deepinfer_generated_tokens", 1)
    with pytest.raises(AssertionError, match="has tags"):
        recorder.set("deepinfer_kv_blocks_used", 1)


def test_the_driver_exports_totals_as_what_was_added(calls: list[Call]) -> None:
    metrics = DriverMetrics(0.0)
    metrics.export(SchedulerCounts(num_waiting=4, num_finished=10))
    metrics.export(SchedulerCounts(num_waiting=1, num_finished=25))
    finished = [value for method, name, value, _ in calls if name == "deepinfer_requests_finished"]
    waiting = [value for method, name, value, _ in calls if name == "deepinfer_requests_waiting"]
    assert (finished, waiting) == ([10, 15], [4, 1])
