"""Commands in processes of their own, with a hard time limit, and engines that are taken down whatever happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny_checkpoint import directory

from deepinfer.config import load_config, resolve
from deepinfer.launcher.providers import stop_ray
from deepinfer.launcher.record import read_record

__all__ = ["ROOT", "TINY", "Commands", "commands", "directory", "processes_in"]

ROOT = Path(__file__).parent.parent.parent
_ENTRIES = {"deepinfer": "deepinfer.cli.main", "deepinfer-cluster": "deepinfer.cli.cluster"}
TINY = """
name: NAME
accelerator: cpu
model: tiny
cache_dir: CACHE
prefill: {ranks: 1, max_running: 4, max_tokens_per_step: 128}
decode: {ranks: 1, max_running: 8}
cache: {memory_bytes: 33554432}
speculative: {max_draft_tokens: 0}
scheduler: {max_kv_bytes_in_flight: 33554432, job_timeout_seconds: 4}
"""


@dataclass
class Commands:
    """Runs the two commands on one cluster file."""

    file: Path
    folder: Path

    def environment(self) -> dict[str, str]:
        hidden = ("DEEPINFER_", "RAY_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def line(self, command: str, *arguments: object) -> list[str]:
        code = f"from {_ENTRIES[command]} import main; main()"
        return [sys.executable, "-c", code, *map(str, arguments)]

    def __call__(self, command: str, *arguments: object, code: int = 0, seconds: float = 400) -> str:
        done = subprocess.run(
            self.line(command, *arguments),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, printed: str, *run: object, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Begin `ray job submit` of `deepinfer run`, as `up` has `printed`; its output comes through a pipe."""
        variables = dict(part.split("=") for part in re.search(r"export (.*)", printed)[1].split())
        address = re.search(r"dashboard: (\S+)", printed)[1]
        submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", address, *options, "--"]
        return subprocess.Popen(
            [*submit, *self.line("deepinfer", "run", "--cluster", self.file, *run)],
            env={**self.environment(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def status(self) -> dict[str, Any]:
        numbers: dict[str, Any] = json.loads(self("deepinfer-cluster", "status", self.file, "--json"))
        return numbers

    def rows(self, name: str, count: int, **fields: object) -> Path:
        lines = []
        for number in range(count):
            body = {"prompt": f"Row {number} says", "max_tokens": 6, "seed": number, **fields}
            line = {"custom_id": f"{name}-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(line))
        path = self.folder / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    def answered(self, path: Path) -> set[str]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"] for line in lines if line["error"] is None}


def processes_in(folder: str) -> list[str]:
    """Command lines that name `folder`."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if folder in line]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """A cluster file of the tiny model on 1 + 1 ranks; its engine ends with the test."""
    file = tmp_path / "cluster.yaml"
    cache = tmp_path / "cache"
    file.write_text(TINY.replace("NAME", f"test{os.getpid()}").replace("CACHE", str(cache)))
    yield Commands(file, tmp_path)
    config = resolve(load_config(file, environ={}).config, accelerator="cpu")
    record = read_record(config)
    if record is not None:
        stop_ray(record, config.ray)
