"""Every Triton kernel against the reference at small sizes, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.op_cases import CHECKS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_triton_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    run = subprocess.run(
        [sys.executable, "-m", "support.triton_interpreter"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    passed = {line.removeprefix("passed ") for line in run.stdout.splitlines() if line.startswith("passed ")}
    assert passed > set(CHECKS), "the backend's own cases run beside those of the ops"
