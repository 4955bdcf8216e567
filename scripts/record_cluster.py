"""Play the life of a shared engine with the real commands, and print what a user sees.

`python scripts/record_cluster.py`: the tiny model on this machine, 1 prefill and 2 decode ranks. Up, two jobs submitted
at once, status, logs, a job in which a rank is killed, down. Says in the end whether pids and load counters were the
same after the two jobs. Exit code 1 when something did not go as it should.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_CLUSTER = """\
name: show
accelerator: cpu
model: tiny
cache_dir: cache
prefill: {ranks: 1, max_running: 8, max_tokens_per_step: 512}
decode: {ranks: 2, max_running: 8}
cache: {memory_bytes: 67108864}
"""
_FILE = "cluster.yaml"
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*m")  # Ray colours its lines whatever they are written to


class Player:
    """Runs commands in `folder`, with the commands of this interpreter's installation first, and prints them."""

    def __init__(self, folder: Path) -> None:
        """Write the cluster file."""
        self.folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        self.failed: list[str] = []
        (folder / _FILE).write_text(_CLUSTER)

    def run(self, *command: str) -> str:
        """Run a command to its end and print what it says."""
        return self.finish(self.start(*command), *command)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[str], *command: str) -> str:
        """Wait for a command and print it with what it said."""
        said = _TERMINAL_CODE.sub("", process.communicate()[0])
        print(f"$ {' '.join(command)}\n{said.rstrip()}\n", flush=True)
        if process.returncode:
            self.failed.append(f"{command[0]}: exit code {process.returncode}")
        return said

    def status(self) -> dict[str, Any]:
        """Ask for the engine's numbers, without printing them."""
        said = subprocess.run(
            ["deepinfer-cluster", "status", _FILE, "--json"],
            cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, check=True,
        ).stdout  # fmt: skip
        numbers: dict[str, Any] = json.loads(said)
        return numbers

    def rows(self, name: str, count: int, max_tokens: int) -> str:
        """Write a batch file and return its name."""
        bodies = [{"prompt": f"Row {number} says", "max_tokens": max_tokens, "seed": number} for number in range(count)]
        lines = [
            json.dumps({"custom_id": f"{name}-{number}", "method": "POST", "url": "/v1/completions", "body": body})
            for number, body in enumerate(bodies)
        ]
        (self.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        return f"{name}.jsonl"

    def job(self, address: str, name: str, count: int, max_tokens: int) -> tuple[str, ...]:
        """Return the command that submits a job of `count` rows."""
        source = self.folder / self.rows(name, count, max_tokens)
        job = ["deepinfer", "run", "--cluster", str(self.folder / _FILE), "-i", str(source)]
        return (
            "ray",
            "job",
            "submit",
            "--address",
            address,
            "--",
            *job,
            "-o",
            str(self.folder / f"{name}-answers.jsonl"),
        )


def play(player: Player) -> None:
    """Play the whole life; what is printed is the record."""
    print(f"$ cat {_FILE}\n{_CLUSTER}")
    said = player.run("deepinfer-cluster", "up", _FILE)
    try:
        variables = re.search(r"export (.*)", said)
        dashboard = re.search(r"dashboard: (\S+)", said)
        assert variables is not None, said
        assert dashboard is not None, said
        player.environment |= dict(part.split("=") for part in variables[1].split())
        before = player.status()
        jobs = [player.job(dashboard[1], name, 12, 40) for name in ("first", "second")]
        print("# both at once")
        for process, command in [(player.start(*command), command) for command in jobs]:
            player.finish(process, *command)
        player.run("deepinfer-cluster", "status", _FILE)
        after = player.status()
        player.run("deepinfer-cluster", "logs", _FILE, "--rank", "decode-0", "--lines", "8")
        _kill_a_rank(player, player.job(dashboard[1], "third", 24, 200))
        player.run("deepinfer-cluster", "logs", _FILE, "--rank", "driver", "--lines", "16")
        player.run("deepinfer-cluster", "status", _FILE)
    finally:
        player.run("deepinfer-cluster", "down", _FILE)
    is_same = before["ranks"] == after["ranks"]
    print(f"# after the two jobs every rank's pid and load counter is {'what it was' if is_same else 'ANOTHER'}")
    if not is_same:
        player.failed.append("ranks were started or loaded again")


def _kill_a_rank(player: Player, command: tuple[str, ...]) -> None:
    """Submit a job and kill decode-1 once it has work."""
    process = player.start(*command)
    status = player.status()
    while not status["loads"].get("decode-1", {}).get("num_running") and process.poll() is None:
        time.sleep(0.2)
        status = player.status()
    pid = status["ranks"]["decode-1"]["pid"]
    print(f"# in the middle of the next job\n$ kill -9 {pid}  # decode-1\n")
    os.kill(pid, signal.SIGKILL)
    player.finish(process, *command)


def main() -> None:
    """Play and print."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-show-") as folder:
        player = Player(Path(folder))
        play(player)
    sys.exit("; ".join(player.failed) or 0)


if __name__ == "__main__":
    main()
