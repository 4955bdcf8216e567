"""`deepinfer run` with the real engine: chat checks, a kill -9 in the middle, and the run that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.doors.batch_files import read_rows, row, write_rows

CHAT = "/v1/chat/completions"
BAD_CHATS = {
    "number": [{"role": "user", "content": 7}],
    "role": [{"role": "pirate", "content": "hi"}],
    "image": [{"role": "user", "content": [{"type": "image_url"}]}],
    "none": [],
}


def _num_ray_processes(pid: int) -> int:
    """How many processes the private Ray of process `pid` still has: its folder stands in their command lines."""
    name = f"deepinfer-ray-{pid}-"
    return sum(name in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_minus_nine_and_resume(tmp_path: Path) -> None:
    """P03, P05 and P12 end to end; the killed run leaves no process of its private Ray behind."""
    rows = [row(f"r{i}", f"Row {i} says", max_tokens=24, seed=i) for i in range(40)]
    rows += [row(name, messages, url=CHAT, max_tokens=4) for name, messages in BAD_CHATS.items()]
    rows += [row("empty", "", max_tokens=4), row("chat", [{"role": "user", "content": "hi"}], url=CHAT, max_tokens=8)]
    source, target = write_rows(tmp_path / "in", rows), tmp_path / "out"
    command = [sys.executable, "-c", "from deepinfer.cli.main import main; main()", "run", "--model", "tiny"]
    command += ["-i", str(source), "-o", str(target)]
    command += ["--set", "prefill.ranks=1", "--set", "decode.ranks=1", "--set", "decode.max_running=4"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    environment["DEEPINFER_CACHE_DIR"] = str(tmp_path / "cache")
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while not target.exists() or target.read_bytes().count(b"\n") < 10:
        assert first.poll() is None
        time.sleep(0.05)
    assert _num_ray_processes(first.pid) > 0
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = [line for line in target.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert len(before) < len(rows)
    second = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert second.returncode == 3, second.stderr
    lines = {line["custom_id"]: line for line in read_rows(target)}
    assert len(read_rows(target)) == len(lines) == len(rows)
    assert set(before) <= set(target.read_bytes().splitlines(keepends=True))
    assert {name for name, line in lines.items() if line["error"]} == set(BAD_CHATS)
    assert all(line["error"]["param"].startswith("messages") for line in lines.values() if line["error"])
    assert _num_ray_processes(first.pid) == 0
    assert lines["chat"]["response"]["body"]["choices"][0]["message"]["content"] == ""  # still thinking
