"""Starts: from nothing, from a node without a GPU, with settings of the driver's side only, and never in silence."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
from support.local_ray import HOST_INTERFACE

from deepinfer.launcher import engine as engine_module
from deepinfer.llm import LLM
from tests.doors.batch_files import read_rows, row, write_rows

ROOT = Path(__file__).parents[2]
MAX_SILENCE_SECONDS = 60.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cold_start" in metafunc.fixturenames:
        metafunc.parametrize("cold_start", range(metafunc.config.getoption("--cold-starts")))


def environment(cache_dir: Path, **more: str) -> dict[str, str]:
    """The environment of a new user process: nothing of this one's Ray, and none of the package's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFER_", "RAY_"))}
    return {**kept, "DEEPINFER_CACHE_DIR": str(cache_dir), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **more}


def spoken(process: subprocess.Popen[str]) -> Iterator[tuple[float, str]]:
    """Yield the lines of stderr with the time of their arrival."""
    for line in process.stderr:
        yield time.monotonic(), line


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_p10_and_p59_a_cold_start_answers_two_rows_and_says_what_it_does(
    cold_start: int, tmp_path: Path, cache_dir: Path
) -> None:
    """In a process and a Ray of its own, in time, never silent for long; ten of them: `--cold-starts 10`."""
    source = write_rows(tmp_path / "in", [row("a", [3, 4], max_tokens=2), row("b", "Hello", max_tokens=2)])
    command = [sys.executable, "-c", "from deepinfer.cli.main import main; main()", "run", "-i", str(source)]
    command += ["-o", str(tmp_path / "out"), "--model", "tiny", "--set", "prefill.ranks=1", "--set", "decode.ranks=1"]
    command += ["--set", "model.max_model_len=128"]
    begin = time.monotonic()
    with subprocess.Popen(command, env=environment(cache_dir), stderr=subprocess.PIPE, text=True) as process:
        lines = list(spoken(process))
    said = "".join(text for _, text in lines)
    assert process.returncode == 0, said
    assert {line["custom_id"] for line in read_rows(tmp_path / "out") if line["response"]} == {"a", "b"}
    times = [begin, *(moment for moment, _ in lines), time.monotonic()]
    assert max(late - early for early, late in itertools.pairwise(times)) < MAX_SILENCE_SECONDS
    assert not unfinished_phases(said)
    for rank in ("prefill-0: ", "decode-0: "):
        assert rank in said


def unfinished_phases(log: str) -> list[str]:
    """The phases that a log begins without saying how they ended and how long they took."""
    begun = re.findall(r" I ([^]]+)\] (.+): begin$", log, re.MULTILINE)
    ended = re.findall(r" [IE] ([^]]+)\] (.+): (?:done in|failed after) [\d.]+ s$", log, re.MULTILINE)
    assert begun, "a log of a start has phases"
    return [f"{who}: {phase}" for who, phase in begun if begun.count((who, phase)) != ended.count((who, phase))]


@pytest.mark.cluster
@pytest.mark.slow
def test_p59_every_phase_of_every_process_is_in_its_log(llm: LLM) -> None:
    """Begin, end and seconds, in the files that Ray keeps of each process."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    of_ranks = {
        f"{ready.role}-{ready.rank}": next(folder.glob(f"worker-*-{ready.pid}.err")).read_text()
        for ready in llm._client.facts.ranks
    }
    assert set(of_ranks) == {"prefill-0", "decode-0", "decode-1"}
    for rank, log in of_ranks.items():
        assert unfinished_phases(log) == []
        phases = re.findall(rf" I {rank}\] (.+): done in", log)
        assert phases[0] == "load code"
        assert {"loading weights", "allocating caches"} < set(phases)
        assert any(phase.startswith("meeting ") for phase in phases)
    of_driver = next(
        log for path in folder.glob("worker-*.err") if "start the engine: done in" in (log := path.read_text())
    )
    assert unfinished_phases(of_driver) == []
    for phase in ("place 2 ranks", "create the actors", "load the code", "load the weights"):
        assert f"{phase}: done in" in of_driver


@pytest.mark.parametrize("answers", [True, False])
def test_p59_a_start_that_hangs_is_never_silent(
    answers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten minutes without any news, from a driver that answers or one that doesn't."""
    now, spoke_at = 0.0, [0.0]

    def wait(references: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += timeout
        if len(caplog.records) > len(spoke_at) - 1:
            spoke_at.append(now)
        return (references, []) if now > 600 else ([], references)

    def get(_: Any, timeout: float) -> dict[str, Any]:
        nonlocal now
        if answers:
            return {"state": "starting", "ranks": {"decode-0": "loading weights"}}
        now += timeout
        raise ray.exceptions.GetTimeoutError

    driver = SimpleNamespace(status=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(engine_module, "ray", SimpleNamespace(wait=wait, get=get))
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.INFO, logger="deepinfer.start"):
        engine_module._report_until_done(driver, "start")
    assert len(spoke_at) > 10
    assert max(late - early for early, late in itertools.pairwise(spoke_at)) < MAX_SILENCE_SECONDS


def test_a_start_that_ends_while_it_is_asked_for_news_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ready driver tells of its ranks in another shape, and a busy one nothing: the last news stands."""
    now, asked = 0.0, 0

    def wait(references: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += 30.0
        return (references, []) if now > 100 else ([], references)

    def get(_: Any, timeout: float) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise ray.exceptions.GetTimeoutError
        ready = {"state": "ready", "ranks": {"decode-0": {"pid": 7}}}
        return {"state": "starting", "ranks": {"decode-0": "loading weights"}} if asked == 1 else ready

    driver = SimpleNamespace(status=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(engine_module, "ray", SimpleNamespace(wait=wait, get=get))
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.INFO, logger="deepinfer.start"):
        engine_module._report_until_done(driver, "start")
    assert [record.getMessage().partition(" s: ")[2] for record in caplog.records] == ["decode-0: loading weights"] * 3


ATTACHED = """
import json, os
import ray
from support.fake_cluster import FAKE_PROGRAM
from deepinfer.llm import LLM

with LLM("tiny", settings={"prefill.ranks": 1, "decode.ranks": 1}, rank_program=FAKE_PROGRAM) as llm:
    assert llm.generate([[1, 2]])[0].error is None
    facts = llm._client.facts
    statuses = [
        ray.get(ray.get_actor(f"{facts.name}-{ready.role}-{ready.rank}").status.remote(), timeout=30)
        for ready in facts.ranks
    ]
print(json.dumps(statuses))
"""


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_p49_switches_reach_the_ranks_and_network_settings_stay(local_ray: None, cache_dir: Path) -> None:
    """A driver elsewhere sets a switch and has a network interface of its own; the ranks' host has another one."""
    switches = {"DEEPINFER_BATCH_INVARIANT": "1", "DEEPINFER_USE_NEXTN_DECODE": "3"}
    assert not set(switches) & set(os.environ)
    of_ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    variables = environment(cache_dir, **of_ray, **switches, GLOO_SOCKET_IFNAME="of-the-driver")
    variables["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    done = subprocess.run([sys.executable, "-c", ATTACHED], env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    statuses = msgspec.json.decode(done.stdout)
    assert len(statuses) == 2
    for status in statuses:
        assert status["settings"]["determinism.batch_invariant"] is True
        assert status["settings"]["speculative.max_draft_tokens"] == 3
        assert status["environment"]["GLOO_SOCKET_IFNAME"] == HOST_INTERFACE
        assert not set(switches) & set(status["environment"])


TWO_NODES = """
import json
import ray
from ray.cluster_utils import Cluster
from support.fake_cluster import FAKE_PROGRAM
from deepinfer.llm import LLM

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
worker = cluster.add_node(num_cpus=1, num_gpus=2)
try:
    settings = {"ray.address": cluster.address, "prefill.ranks": 1, "decode.ranks": 1}
    with LLM("tiny", settings=settings, rank_program=FAKE_PROGRAM) as llm:
        assert llm.generate([[1, 2]])[0].error is None
        facts = llm._client.facts
        actors = [ray.get_actor(f"{facts.name}-{ready.role}-{ready.rank}") for ready in facts.ranks]
        nodes = {ray.get(actor.probe.remote(), timeout=30).node_id for actor in actors}
        here = ray.get_runtime_context().get_node_id()
        print(json.dumps({"accelerator": facts.config.accelerator, "ranks_have_gpus": nodes == {worker.node_id},
                          "driver_has_none": here != worker.node_id}))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


TOO_FEW_GPUS = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor
import ray
from ray.cluster_utils import Cluster
from support.fake_cluster import FAKE_PROGRAM
from deepinfer.errors import ConfigError
from deepinfer.llm import LLM
from deepinfer.log import set_up_logging

def start(**more):
    return LLM("tiny", settings={**settings, **more}, rank_program=FAKE_PROGRAM)

set_up_logging("info")
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 1, "include_dashboard": False})
settings = {"ray.address": cluster.address, "prefill.ranks": 1, "decode.ranks": 1}
try:
    try:
        start(**{"scheduler.placement_timeout_seconds": 3})
    except ConfigError as error:
        print(error)
    print("REFUSED", file=sys.stderr, flush=True)
    with start(ranks_per_device=2) as llm:
        print(llm.generate([[1, 2]])[0].error)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start)
        time.sleep(4.0)
        cluster.add_node(num_cpus=1, num_gpus=1)
        llm = starting.result()
    with llm:
        print(llm.generate([[1, 2]])[0].error)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_gpu_too_few_is_told_with_the_cure_before_any_rank_loads(cache_dir: Path) -> None:
    """Two roles ask for a GPU each, of one; then they share it; then the second one joins while they wait."""
    variables = environment(cache_dir, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    command = [sys.executable, "-c", TOO_FEW_GPUS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    refusal, *answers = done.stdout.splitlines()
    assert refusal.startswith("ranks_per_device: 1 prefill and 1 decode ranks ask for 2 GPU, all nodes together have")
    assert answers == ["None", "None"]
    before, after = done.stderr.split("REFUSED")
    assert "placed" not in before, "a rank was started in vain"
    assert "placed" in after
    for lines in (before, after):
        assert "waits for a place" in lines


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_p48_a_driver_on_a_node_without_gpus(cache_dir: Path) -> None:
    """The head has none; what is detected is what the cluster has, and the ranks go where the GPUs are."""
    variables = environment(cache_dir, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    done = subprocess.run([sys.executable, "-c", TWO_NODES], env=variables, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout.splitlines()[-1]) == {
        "accelerator": "nvidia",
        "ranks_have_gpus": True,
        "driver_has_none": True,
    }
