"""The table is well formed, and a recorder refuses what is not in it."""

from __future__ import annotations

import pytest

from deepinfer.metrics import METRICS, MemoryRecorder


def test_names_are_unique_and_prefixed() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("deepinfer_") for name in names)
    assert all((metric.kind == "histogram") == bool(metric.buckets) for metric in METRICS)


def test_memory_recorder_keeps_totals_by_tag() -> None:
    recorder = MemoryRecorder()
    recorder.add("deepinfer_prompt_tokens", 3)
    recorder.add("deepinfer_prompt_tokens", 4)
    recorder.set("deepinfer_kv_blocks_used", 5, {"group": "global"})
    recorder.observe("deepinfer_step_seconds", 0.5, {"phase": "decode"})
    assert recorder.get("deepinfer_prompt_tokens") == 7
    assert recorder.get("deepinfer_kv_blocks_used", {"group": "global"}) == 5
    assert recorder.get("deepinfer_kv_blocks_used", {"group": "window"}) == 0


@pytest.mark.parametrize(
    ("name", "tags"),
    [("deepinfer_promt_tokens", None), ("deepinfer_kv_blocks_used", None), ("deepinfer_prompt_tokens", {"group": "x"})],
)
def test_unknown_names_kinds_and_tags_are_refused(name: str, tags: dict[str, str] | None) -> None:
    with pytest.raises(AssertionError):
        MemoryRecorder().add(name, 1, tags)
