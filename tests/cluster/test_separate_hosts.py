"""Five hosts with addresses and process ids of their own, brought up over a false ssh; one dies, or the driver does."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.namespaces import Hosts, can_make_hosts, make_hosts

from tests.cluster.conftest import ROOT, TINY, Commands

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and iproute2"),
]
NUM_ROWS = 40
GROUPS = {
    "prefill: {ranks: 1,": "prefill: {ranks: 2, ranks_per_node: 1,",
    "decode: {ranks: 1,": "decode: {ranks: 2, ranks_per_node: 1,",
}


@dataclass
class HeadCommands(Commands):
    """Runs the commands on the first host, which becomes Ray's head."""

    hosts: Hosts

    @property
    def head(self) -> str:
        return self.hosts.addresses[0]

    def line(self, command: str, *arguments: object) -> list[str]:
        return self.hosts.line(self.head, super().line(command, *arguments))

    def start_run(self, source: Path, target: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.line("deepinfer", *self.run_arguments(source, target)),
            env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run_arguments(self, source: Path, target: Path) -> tuple[object, ...]:
        return ("run", "--cluster", self.file, "-i", source, "-o", target)

    def kill_on_head(self, pid: int) -> None:
        subprocess.run(self.hosts.line(self.head, ["kill", "-9", str(pid)]), check=True)

    def left(self) -> list[str]:
        return [line for address in self.hosts.addresses for line in self.hosts.processes(address)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[HeadCommands]:
    """Five hosts with a place for one rank each, and the cluster file of two prefill and two decode ranks on them."""
    one_place = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 1}'}
    environment = {**Commands(tmp_path, tmp_path).environment(), **one_place}
    with make_hosts(5, tmp_path, shared=[tmp_path, ROOT], environment=environment) as hosts:
        text = TINY.replace("NAME", "hosts").replace("CACHE", str(tmp_path / "cache"))
        for old, new in GROUPS.items():
            assert old in text
            text = text.replace(old, new)
        ray = f"{{provider: ssh, hosts: [{', '.join(hosts.addresses)}], ssh_command: [{hosts.ssh}]}}"
        file = tmp_path / "cluster.yaml"
        file.write_text(f"{text}ray: {ray}\n")
        yield HeadCommands(file, tmp_path, hosts)


def wait_until(is_so: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for_answers(cluster: HeadCommands, target: Path, job: subprocess.Popen[str]) -> None:
    wait_until(lambda: job.poll() is not None or (target.exists() and len(cluster.answered(target)) > 3))
    assert job.poll() is None, job.communicate()[0]


def test_a_host_that_dies_costs_no_row(cluster: HeadCommands) -> None:
    """P44: the job goes on with the rank on the host that was free, and `down` stops all that still answer."""
    printed = cluster("deepinfer-cluster", "up", cluster.file, seconds=700)
    assert f"dashboard: http://{cluster.head}:" in printed
    before = cluster.status()
    nodes = {rank: facts["node"] for rank, facts in before["ranks"].items()}
    assert len(set(nodes.values())) == 4
    victim = next(rank for rank in ("decode-0", "decode-1") if nodes[rank] != "host-0")
    source, target = cluster.rows("row", NUM_ROWS, max_tokens=60), cluster.folder / "answers"
    with cluster.start_run(source, target) as job:
        wait_for_answers(cluster, target, job)
        cluster.hosts.kill(cluster.hosts.addresses[int(nodes[victim].removeprefix("host-"))])
        said = job.communicate(timeout=400)[0]
    assert job.returncode == 0, said
    assert len(cluster.answered(target)) == NUM_ROWS
    after = cluster.status()
    assert after["restarts"] == {"prefill": 0, "decode": 1}
    assert nodes[victim] not in {facts["node"] for facts in after["ranks"].values()}
    assert {rank: after["ranks"][rank] for rank in ("prefill-0", "prefill-1")} == {
        rank: before["ranks"][rank] for rank in ("prefill-0", "prefill-1")
    }
    said = cluster("deepinfer-cluster", "down", cluster.file)
    assert said.count("nothing was stopped there") == 1
    assert cluster.left() == []


def test_a_new_driver_takes_over_the_ranks_of_four_hosts(cluster: HeadCommands) -> None:
    cluster("deepinfer-cluster", "up", cluster.file, seconds=700)
    before = cluster.status()
    source, target = cluster.rows("row", NUM_ROWS, max_tokens=60), cluster.folder / "answers"
    with cluster.start_run(source, target) as job:
        wait_for_answers(cluster, target, job)
        cluster.kill_on_head(before["pid"])
        said = job.communicate(timeout=200)[0]
    assert job.returncode == 1, said
    assert 3 < len(cluster.answered(target)) < NUM_ROWS
    said = cluster("deepinfer", *cluster.run_arguments(source, target))
    assert re.search(r"the new driver has taken over in [\d.]+ s", said)
    assert len(cluster.answered(target)) == NUM_ROWS, "each row has one line"
    after = cluster.status()
    assert (after["ranks"], after["epoch"]) == (before["ranks"], 2), "no rank was started or loaded again"
    assert after["pid"] != before["pid"]
    cluster("deepinfer-cluster", "down", cluster.file)
    assert cluster.left() == []
