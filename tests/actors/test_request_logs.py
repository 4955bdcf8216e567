"""The driver's lines about a request name it as the user does; they are found in the log files of Ray."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import ray
from support.fake_cluster import collect, make_request
from support.fake_engine import FAULT, Fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def _lines_with(word: str) -> list[str]:
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        files = (session / "logs").glob("worker-*.err")
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if word in line]
        if lines:
            return lines
        time.sleep(0.1)
    return []


def test_the_driver_names_the_row_of_a_request_that_failed(shared_engine) -> None:
    job = shared_engine.client.open_job()
    request = msgspec.structs.replace(make_request("bad-7", [FAULT, Fault.FAIL_REQUEST]), label="my story")
    job.submit([request])
    collect(job, 1)
    [line] = _lines_with("bad-7")
    assert line.endswith('W driver] numerics: NaN in the fake logits | request=bad-7 row="my story"')
    job.close()
