"""P44 with several raylets: rendezvous and hand-over across nodes, and a decode node that dies in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import ROOT, Commands


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", ["fake", "real"])
def test_a_killed_node_costs_no_answer(commands: Commands, ranks: str) -> None:
    code = [sys.executable, str(Path(__file__).parent / "nodes_case.py"), str(commands.folder), ranks]
    environment = {**commands.environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    program = subprocess.Popen(code, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        printed, _ = program.communicate(timeout=500)
    finally:
        if program.poll() is None:
            for process in psutil.Process(program.pid).children(recursive=True):
                process.kill()
            program.kill()
    assert program.returncode == 0
    found = json.loads(printed.splitlines()[-1])
    assert found["errors"] == []
    assert found["driver_is_here"], "no node that dies may take the driver along"
    assert len(set(found["before"].values())) == 4, "every rank has a node of its own"
    assert found["restarts"] == {"prefill": 0, "decode": 1}
    assert found["before"][found["victim"]] not in found["after"].values()
    assert {rank: found["after"][rank] for rank in ("prefill-0", "prefill-1")} == {
        rank: found["before"][rank] for rank in ("prefill-0", "prefill-1")
    }
    assert found["equal"] == [True] * 8
