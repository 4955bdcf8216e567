"""What a user can see of a running engine: a rank's profile, and the exported metrics."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import time
import urllib.request

import pytest
import ray

from deepinfer.config import load_config, resolve
from deepinfer.launcher import connected
from deepinfer.metrics import METRICS
from tests.cluster.conftest import Commands

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# What a short job on a healthy engine without drafts does not do: Ray's counters appear with their first count.
_NOT_IN_THIS_RUN = {
    "deepinfer_requests_failed",
    "deepinfer_requests_preempted",
    "deepinfer_drafted_tokens",
    "deepinfer_accepted_tokens",
    "deepinfer_rank_restarts",
    "deepinfer_fallback_tokens",
}


def _exported(commands: Commands) -> str:
    """Return what a Prometheus would scrape from Ray's agent on this machine."""
    config = resolve(load_config(commands.file, environ={}).config, accelerator="cpu")
    with connected(config):
        [node] = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read().decode()


def _series(text: str) -> dict[str, set[tuple[str, str]]]:
    """Return the (role, rank) pairs under which each of our metrics is exported."""
    found: dict[str, set[tuple[str, str]]] = {}
    for name, labels in re.findall(r"^ray_(deepinfer_\w+)\{(.*)\} ", text, re.MULTILINE):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault(name, set()).add((tags["role"], tags["rank"]))
    return found


@pytest.mark.timeout(1200)
def test_a_running_engine_can_be_watched(commands: Commands) -> None:
    commands.file.write_text(commands.file.read_text() + "observability: {metrics_interval_seconds: 0.2}\n")
    commands("deepinfer-cluster", "up", commands.file, seconds=300)
    profile = ("deepinfer-cluster", "profile", commands.file, "-o", commands.folder / "traces", "--rank")
    printed = commands(*profile, "decode-7", code=2)
    assert "'decode-7' is no rank of this engine; its ranks are prefill-0, decode-0" in printed
    printed = commands(*profile, "prefill-0", "--wait-seconds", 0.5, code=1)
    assert "prefill-0 ran no step for 0.5 s; run a job meanwhile" in printed

    source, target = commands.rows("a", 8, max_tokens=60), commands.folder / "answers"
    line = commands.line("deepinfer", "run", "--cluster", commands.file, "-i", source, "-o", target)
    job = subprocess.Popen(line, env=commands.environment(), stderr=subprocess.DEVNULL)
    printed = commands(*profile, "decode-0", "--steps", 3, "--wait-seconds", 200, seconds=400)
    assert re.search(r"decode-0: 3 steps in \d", printed)
    assert re.search(r"aten::\w+ +host ", printed)
    [trace] = (commands.folder / "traces").iterdir()
    assert f"trace: {trace} ({trace.stat().st_size:,} bytes)" in printed
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("cat") == "user_annotation" for event in events) == 3
    assert job.wait(300) == 0
    assert len(commands.answered(target)) == 8

    wanted = {f"{m.name}_total" if m.kind == "counter" else m.name for m in METRICS if not m.waits_for}
    wanted = {f"{name}_count" if name == "deepinfer_step_seconds" else name for name in wanted}
    wanted -= {f"{name}_total" for name in _NOT_IN_THIS_RUN}
    found: dict[str, set[tuple[str, str]]] = {}
    deadline = time.monotonic() + 60  # Ray's agent gathers every ten seconds
    while not wanted <= set(found) and time.monotonic() < deadline:
        found = _series(_exported(commands))
        time.sleep(1)
    unknown = {name for name in found if not any(name.startswith(metric.name) for metric in METRICS)}
    assert (wanted - set(found), unknown) == (set(), set())
    assert found["deepinfer_generated_tokens_total"] == {("prefill", "0"), ("decode", "0")}
    assert found["deepinfer_requests_finished_total"] == {("driver", "0")}
    commands("deepinfer-cluster", "down", commands.file)
