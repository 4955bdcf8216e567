"""A benchmark measures the rank that a job runs: same build, same engine, same forward; and its arithmetic."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli import bench, bench_report
from deepinfer.cli.main import run_command
from deepinfer.errors import RequestError
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.random_model import RandomModel
from deepinfer.protocol import StepProfile
from deepinfer.runtime import build
from deepinfer.runtime.bench import bench_rank
from deepinfer.runtime.bench.kernel_times import KernelTime, KernelTimes, kernel_times
from deepinfer.runtime.bench.scheduling import driver_cost
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.rank_engine import RankEngine

SMALL = ["--model", "tiny", "--layers", "6", "--ranks", "4", "--warm-up", "1", "--watch", "0"]


def test_a_benchmark_has_no_forward_of_its_own() -> None:
    changed = {name for name in vars(RandomModel) if not name.startswith("__")}
    assert changed == {"allocate_caches", "import_kv"}
    assert RandomModel.forward is DeepseekV41.forward
    assert bench_rank.build_rank_engine is build.build_rank_engine
    assert build.RankEngine is RankEngine
    assert build.ModelRunner is ModelRunner


def _run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    target = tmp_path / "times.json"
    assert run_command(["bench", *arguments, *SMALL, "--json", str(target)]) == 0
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def test_decode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--requests", "2", "--context", "70", "--drafts", "2", "--steps", "2", "--acceptance", "2.5"]
    found = _run(monkeypatch, tmp_path, "decode", *sizes)
    assert len(found["period_seconds"]) == len(found["device_seconds"]) == 2
    assert found["tokens_per_second"] == pytest.approx(5.0 / found["seconds"]["median"])
    assert found["roof_seconds"] is None
    assert set(found["kernel_set"].values()) == {"reference"}
    assert found["config"]["speculative"]["max_draft_tokens"] == 2
    printed = capsys.readouterr().out
    assert "not measured on a CPU" in printed
    assert "Left out: the exchange between ranks" in printed


def test_prefill_counts_the_steps_of_a_prompt_as_one_and_says_how_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tokens", "48", "--steps", "2", "--set", "prefill.max_tokens_per_step=24"]
    found = _run(monkeypatch, tmp_path, "prefill", *options)
    assert len(found["period_seconds"]) == 2
    assert found["tokens_per_second"] == pytest.approx(48 / found["seconds"]["median"])
    assert found["steps_per_pass"] == 2
    assert "2, of 24 tokens at the most" in capsys.readouterr().out


@pytest.mark.parametrize(("file", "expected"), [(None, 16384), ("prefill: {max_running: 3}", 2048)])
def test_prompts_run_in_one_step_unless_a_file_or_a_setting_says_otherwise(
    file: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands for a job, which has its default."""
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    cluster = None if file is None else tmp_path / "cluster.yaml"
    if cluster is not None:
        cluster.write_text(str(file))
    for settings, wanted in ((None, expected), (["prefill.max_tokens_per_step=100"], 100)):
        config = bench._config(cluster, settings, "tiny", verbose=False)
        assert config.prefill.step_tokens == wanted


def _event(name: str, begin: float, duration: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}


def test_kernels_of_a_profile_are_added_up_by_name() -> None:
    """Two overlap, one copy, a pause of 5 microseconds, and events that are none of the device's."""
    events = [
        _event("product", 100.0, 10.0),
        _event("norm", 105.0, 15.0),
        _event("Memcpy HtoD", 125.0, 5.0, "gpu_memcpy"),
        _event("product", 130.0, 20.0),
        _event("aten::mm", 0.0, 500.0, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    trace = gzip.compress(json.dumps({"traceEvents": events}).encode())
    found = kernel_times(StepProfile(num_steps=2, seconds=1.0, trace=trace))
    assert found.num_steps == 2
    assert (found.wall_seconds, found.busy_seconds) == (pytest.approx(50e-6), pytest.approx(45e-6))
    assert [(kernel.name, kernel.count) for kernel in found.kernels] == [
        ("product", 2),
        ("norm", 1),
        ("Memcpy HtoD", 1),
    ]
    assert [kernel.seconds for kernel in found.kernels] == pytest.approx([30e-6, 15e-6, 5e-6])


def test_kernels_of_a_pass_are_those_of_its_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps a prompt, of which eight were watched: four prompts."""
    options = ["--tokens", "48", "--steps", "1", "--set", "prefill.max_tokens_per_step=24"]
    watched = KernelTimes(8, 1.0, 0.5, (KernelTime("_route_kernel", 320, 0.4),))
    reports: list[Any] = []
    monkeypatch.setattr(bench, "print_report", lambda report, _: reports.append(report))
    _run(monkeypatch, tmp_path, "prefill", *options)
    report = replace(reports[0], times=replace(reports[0].times, kernels=watched))
    assert list(bench_report.kind_seconds(report).values()) == [pytest.approx(0.1)]


def test_scheduling(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--requests", "40", "--running", "4", "--tokens", "20", "--ranks", "3"]
    assert run_command(["bench", "scheduler", *sizes]) == 0
    printed = capsys.readouterr().out
    assert "a decode rank's step, 4 sequences" in printed
    assert "driver, 3 decode ranks" in printed


def test_every_simulated_request_gets_all_its_tokens() -> None:
    cost = driver_cost(30, prefill_ranks=2, decode_ranks=2, max_running=5, max_tokens=9)
    # eight tokens behind the first one take a round, and ten requests run at a time
    assert (cost.num_requests, cost.num_tokens) == (30, 270)
    assert cost.num_rounds >= 6


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}', "is no JSON list of numbers"),
        ("[1, 2, 3]", "3 numbers for the 4 experts of one of 4 ranks"),
        ("[2, -1]", "write finite numbers from 0 on"),
        ("[0, 0]", "not all 0"),
        ("[1, Infinity]", "write finite numbers"),
        ("[]", "write finite numbers"),
    ],
)
def test_a_skew_that_can_not_be_is_refused(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "skew.json"
    file.write_text(content)
    assert run_command(["bench", "decode", *SMALL, "--context", "70", "--skew", str(file)]) == 2
    printed = capsys.readouterr().err
    assert "--skew" in printed
    assert said in printed


def test_more_ranks_than_experts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "decode", "--model", "tiny", "--context", "70", "--ranks", "17"]) == 2
    assert "--ranks: 17 are more than the model's 16 experts" in capsys.readouterr().err


def test_the_rest_of_the_measurement_ends_with_a_failed_request() -> None:
    class Failing:
        def take_results(self) -> Any:
            failure = type("Failure", (), {"request_id": "bench-3", "kind": "numerical_error", "text": "NaN"})
            return type("Results", (), {"failures": (failure,)}), []

    thread = bench_rank.EngineThread(Failing())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="bench-3 failed: NaN"):
        thread.check()
