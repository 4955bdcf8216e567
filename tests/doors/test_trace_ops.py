"""Own times of operations from a trace's nested events."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from deepinfer.cli.trace_ops import op_times


def _event(name: str, ts: float, dur: float, *, cat: str = "cpu_op", tid: Any = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {}}


TRACE = gzip.compress(
    json.dumps(
        {
            "schemaVersion": 1,
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 1, "tid": "main", "args": {}},
                _event("step 4", 0, 1000, cat="user_annotation"),
                _event("linear", 10, 100),
                _event("to", 20, 40),
                _event("copy", 30, 20),
                _event("to", 70, 10),
                _event("linear", 110, 5),
                _event("copy", 15, 50, tid=2),
                _event("gemm<float>", 200, 300, cat="kernel", tid="stream 7"),
            ],
        }
    ).encode()
)


def test_time_within_an_operation_belongs_to_the_innermost() -> None:
    times = op_times(TRACE)
    assert [(op.name, op.on_device, op.num_calls) for op in times] == [
        ("gemm<float>", True, 1),
        ("copy", False, 2),
        ("linear", False, 2),
        ("to", False, 2),
    ]
    micros = [op.seconds * 1e6 for op in times]
    assert micros == pytest.approx([300, 20 + 50, 100 - 40 - 10 + 5, 40 - 20 + 10])
