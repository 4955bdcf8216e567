"""Every metric of the table is recorded by a rank or by the driver, or waits for a feature by name."""

from __future__ import annotations

import pytest
from support.rank_engines import answer_all, build_fake_rank, make_request

from deepinfer.actors import driver_metrics
from deepinfer.actors.driver_metrics import DriverMetrics
from deepinfer.metrics import METRICS, MemoryRecorder
from deepinfer.scheduler.request_book import SchedulerCounts


def _names(recorder: MemoryRecorder) -> set[str]:
    return {name for name, _ in recorder.values}


def test_ranks_and_driver_record_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode")
    answer_all(prefill.engine, decode.engine, [make_request(0, [3, 4, 5])])
    of_driver = MemoryRecorder()
    of_driver.push = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(driver_metrics, "RayRecorder", lambda **_: of_driver)
    metrics = DriverMetrics(0.0)
    metrics.count_restart()
    metrics.export(SchedulerCounts())
    recorded = _names(prefill.recorder) | _names(decode.recorder) | _names(of_driver)
    assert recorded == {metric.name for metric in METRICS if not metric.waits_for}


def test_what_waits_for_a_feature_can_not_be_recorded() -> None:
    waiting = {metric.name: metric.waits_for for metric in METRICS if metric.waits_for}
    assert waiting == {
        "deepinfer_cached_tokens": "prefix caching",
        "deepinfer_expert_imbalance": "expert balancing",
    }
    with pytest.raises(AssertionError, match="not in the table of what is recorded"):
        MemoryRecorder().add("deepinfer_cached_tokens")
