"""The pushing dispatcher between processes that share memory, its kernels under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepinfer.distributed.dispatchers import Dispatchers
from deepinfer.distributed.local_dispatcher import LocalDispatcher

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_arrive_in_order_and_answers_come_back(num_ranks: int) -> None:
    """Rows of different numbers, of none, in rehearsals, and look-ups; and a rank that never comes is an error."""
    pytest.importorskip("triton")
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    run = subprocess.run(
        [sys.executable, "-m", "support.push_ranks", str(num_ranks)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    alone, together = run.stdout.splitlines()
    assert alone == "decode rank 0: an exchange of 2 ranks lasted over 1e-05 s; one hangs or is gone"
    assert together == "faults: []"


class _Link:
    """Notes when it is in a rehearsal."""

    is_rehearsal = False

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self.is_rehearsal = True
        yield
        self.is_rehearsal = False

    def check(self) -> None:
        raise AssertionError("checked")


def test_a_step_is_recorded_in_a_rehearsal_and_replayed_outside() -> None:
    link, seen = _Link(), []

    def capture(work: Callable[[], object]) -> Callable[[], object]:
        work()
        return work

    dispatchers = Dispatchers(LocalDispatcher, link)
    replay = dispatchers.recording(capture)(lambda: seen.append(link.is_rehearsal))
    replay()
    assert seen == [True, False]
    with pytest.raises(AssertionError, match="checked"):
        dispatchers.check()


def test_each_number_of_experts_has_one_dispatcher() -> None:
    dispatchers = Dispatchers(LocalDispatcher)
    assert dispatchers(4) is dispatchers(4)
    assert (dispatchers(4).num_experts, dispatchers(8).num_experts) == (4, 8)
    dispatchers.check()
