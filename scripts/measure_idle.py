"""What an idle engine costs: `python scripts/measure_idle.py --minutes 10`.

Brings a shared engine of the tiny model up (1 prefill and 2 decode ranks on this machine), leaves it alone, and prints
how much of a core each of its processes took meanwhile, from the CPU seconds that the kernel counts. Then a job shows
that the engine still answers, and how long the first answer takes. The engine is taken down in the end.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from deepinfer.actors.rank_life import RankProgram
from deepinfer.config import ClusterConfig, load_config, resolve
from deepinfer.launcher import bring_up, read_status, take_down
from deepinfer.launcher.ray_processes import processes_of
from deepinfer.launcher.record import ClusterRecord
from deepinfer.llm import LLM, SamplingParams
from deepinfer.log import set_up_logging
from deepinfer.models.model_digest import model_digest
from deepinfer.models.model_source import resolve_model

# Parts of Ray by a word of their command lines, looked for in this order: a raylet's line holds those of its agents.
_RAY_PARTS = {
    "gcs_server": "gcs server",
    "raylet/raylet": "raylet",
    "DashboardAgent": "dashboard agent",
    "RuntimeEnvAgent": "runtime environment agent",
    "ray-dashboard-": "dashboard modules",
    "dashboard/dashboard.py": "dashboard",
    "log_monitor": "log monitor",
    "autoscaler": "autoscaler monitor",
    "util.client.server": "client server",
    "ray::IDLE": "idle workers",
}
_PROMPT = "The engine was idle for a while, and"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what an idle engine costs.")
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    set_up_logging("warning")
    with tempfile.TemporaryDirectory(prefix="deepinfer-idle-") as cache:
        config = _config(cache)
        directory = resolve_model("tiny", revision=None, cache_dir=Path(cache))
        print("bringing the engine up", flush=True)
        record, _ = bring_up(
            config, model_directory=str(directory), model_digest=model_digest(directory), program=RankProgram()
        )
        try:
            print(f"idle for {minutes:g} minutes", flush=True)
            names = _names(config, record)
            shares = measure(names, seconds=60.0 * minutes)
            Console().print(_table(shares, names))
            first, every = _answer(config)
            print(f"after that: first of 8 answers in {first:.2f} s, all in {every:.2f} s, attaching included")
            status = read_status(config)
            print(f"state {status['state']}, restarts {sum(status['restarts'].values())}")
        finally:
            take_down(config, drain_seconds=0.0)


def measure(names: dict[int, str], *, seconds: float) -> dict[int, float]:
    """Return the share of a core that each process of `names` (kind by pid) took during `seconds`."""
    begin = time.monotonic()
    before = {pid: _cpu_seconds(pid) for pid in names}
    time.sleep(seconds)
    passed = time.monotonic() - begin
    return {pid: (_cpu_seconds(pid) - before[pid]) / passed for pid in names if psutil.pid_exists(pid)}


def _config(cache: str) -> ClusterConfig:
    settings = [
        f"name=idle-{secrets.token_hex(2)}",
        f"cache_dir={cache}",
        "prefill.ranks=1",
        "decode.ranks=2",
        "cache.memory_bytes=33554432",
        "scheduler.max_kv_bytes_in_flight=33554432",
    ]
    return resolve(load_config(None, settings=settings, model="tiny").config, accelerator="cpu")


def _names(config: ClusterConfig, record: ClusterRecord) -> dict[int, str]:
    """Return the kind of every process of the engine and its Ray, by pid."""
    status = read_status(config)
    names = {status["pid"]: "driver"}
    names |= {rank["pid"]: f"{name.partition('-')[0]} rank" for name, rank in status["ranks"].items()}
    found = processes_of(Path(str(record.folder)))
    return {process.pid: _ray_part(process) for process in found} | names


def _ray_part(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((f"Ray: {name}" for word, name in _RAY_PARTS.items() if word in line), f"Ray: {process.name()}")


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _table(shares: dict[int, float], names: dict[int, str]) -> Table:
    by_kind: defaultdict[str, list[float]] = defaultdict(list)
    for pid, share in shares.items():
        by_kind[names[pid]].append(share)
    table = Table(title="an idle engine, % of one core", title_justify="left")
    for column in ("process", "number", "each", "together"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for kind, values in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
        table.add_row(kind, str(len(values)), f"{100 * sum(values) / len(values):.2f}", f"{100 * sum(values):.2f}")
    table.add_row("all", str(len(shares)), "", f"{100 * sum(shares.values()):.2f}")
    return table


def _answer(config: ClusterConfig) -> tuple[float, float]:
    """Return the seconds until the first and the last of eight answers, from the decision to run a job on."""
    begin = time.monotonic()
    first = 0.0
    with LLM(cluster=config, attach=True) as llm:
        for answer in llm.generate_iter([_PROMPT] * 8, SamplingParams(max_tokens=8)):
            assert answer.error is None, answer.error
            first = first or time.monotonic() - begin
    return first, time.monotonic() - begin


if __name__ == "__main__":
    main()
