"""The parts of the launcher that need no Ray: records, differences, names of logs, hosts over a false ssh."""

from __future__ import annotations

import gc
import io
import os
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from rich.console import Console

from deepinfer import __version__
from deepinfer.actors.engine_facts import EngineFacts
from deepinfer.cli.cluster_tables import rank_table
from deepinfer.config import ClusterConfig, load_config, resolve
from deepinfer.errors import ClusterError, ConfigError
from deepinfer.launcher.differences import check_joinable
from deepinfer.launcher.engine import summarize
from deepinfer.launcher.host_domains import with_domains
from deepinfer.launcher.local import open_ray, start_patiently
from deepinfer.launcher.logs import _choose, read_logs
from deepinfer.launcher.ray_processes import stop_processes
from deepinfer.launcher.record import (
    ClusterRecord,
    living,
    mark_processes,
    read_record,
    remove_record,
    write_record,
)
from deepinfer.launcher.ssh import host_arguments, host_record, start_on_hosts, stop_on_hosts
from deepinfer.protocol import RankReady


def make_config(*settings: str) -> ClusterConfig:
    return resolve(load_config(settings=["model=tiny", *settings], environ={}).config, accelerator="cpu")


def make_facts(config: ClusterConfig, *, digest: str = "same", version: str = __version__) -> EngineFacts:
    ready = RankReady(
        rank=0, role="prefill", node="n", device="cpu", pid=1, num_blocks={}, num_slots=1, kernel_set={},
        model_digest=digest, layout_digest="", version=version,
    )  # fmt: skip
    return EngineFacts(
        name="e", config=config, model_directory="/somewhere", vocab_size=1, max_model_len=1, ranks=(ready,)
    )


def test_a_record_is_found_again_and_forgotten(tmp_path: Path) -> None:
    config = make_config(f"cache_dir={tmp_path}", "name=one")
    assert read_record(config) is None
    here, elsewhere = platform.node(), "another-machine"
    processes = [(here, os.getpid()), (here, 2**30), (elsewhere, os.getppid())]
    record = ClusterRecord(
        name="one", provider="local", address="1.2.3.4:5", token="/t", processes=mark_processes(processes)
    )
    write_record(config, record)
    assert read_record(config) == record
    assert read_record(make_config(f"cache_dir={tmp_path}", "name=two")) is None
    assert [process.pid for process in living(record.processes)] == [os.getpid()]
    later = msgspec.structs.replace(record.processes[0], created=record.processes[0].created + 1)
    assert living([later]) == [], "another process with the same pid is not ours"
    remove_record(config)
    assert read_record(config) is None


def test_only_processes_of_that_ray_are_ended(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    proxy = [*sleep, "-m", "ray.util.client.server"]  # names its Ray in its environment only
    token = {**os.environ, "RAY_AUTH_TOKEN_PATH": f"{tmp_path}/token"}
    ours = [
        subprocess.Popen([*sleep, f"--dir={tmp_path}/session", "/lib/ray/raylet"]),
        subprocess.Popen(proxy, env=token),
    ]
    others = [
        subprocess.Popen([*sleep, f"{tmp_path}/session/logs"]),
        subprocess.Popen([*sleep, "--dir=/elsewhere", "/lib/ray/raylet"]),
        subprocess.Popen(proxy),
        subprocess.Popen(sleep, env=token),
    ]
    try:
        assert stop_processes(tmp_path, ()) == []
        assert None not in [process.poll() for process in ours]
        assert [process.poll() for process in others] == [None] * len(others)
    finally:
        for process in (*ours, *others):
            process.kill()
            process.wait()


CARELESS = """
import subprocess, sys, time
ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *sys.stdin.readline().split()])
print(ours.pid, flush=True)
time.sleep(60)
"""


def test_an_ended_process_that_nobody_collects_is_gone(tmp_path: Path) -> None:
    """As in a container whose first process collects nobody."""
    careless = [sys.executable, "-c", CARELESS]
    with subprocess.Popen(careless, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        try:
            parent.stdin.write(f"--dir={tmp_path}/session /lib/ray/raylet\n")
            parent.stdin.flush()
            pid = int(parent.stdout.readline())
            assert stop_processes(tmp_path, ()) == []
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        finally:
            parent.kill()


def test_an_equal_engine_is_joined_whatever_a_job_may_set_for_itself() -> None:
    running = make_config("decode.ranks=3")
    mine = make_config(
        "decode.ranks=3", "ray.address=x:1", "cache_dir=/other", "observability.log_level=debug",
        "scheduler.max_in_flight=7", "model.path=/copy/of/tiny",
    )  # fmt: skip
    check_joinable(mine, "same", make_facts(running))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("decode.ranks=2", "decode.ranks: the engine has 4, this job asks for 2"),
        ("determinism.batch_invariant=true", "determinism.batch_invariant: the engine has False"),
        ("kernels.numerics=fp32", "kernels.numerics: the engine has 'reference', this job asks for 'fp32'"),
    ],
)
def test_another_engine_is_refused_with_the_difference(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_joinable(make_config(setting), "same", make_facts(make_config()))
    assert message in str(caught.value)


def test_another_checkpoint_or_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"digest other.*version: the engine is deepinfer 0\.0\.0"):
        check_joinable(make_config(), "same", make_facts(make_config(), digest="other", version="0.0.0"))


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (None, ["driver", "prefill-0", "decode-0", "decode-1", "decode-10"]),
        ("driver", ["driver"]),
        ("decode-1", ["decode-1"]),
        ("0", ["prefill-0", "decode-0"]),
    ],
)
def test_logs_are_chosen_by_rank(which: str | None, expected: list[str]) -> None:
    names = ["e-decode-10", "e-decode-1", "e-decode-0", "e-prefill-0", "e-driver", "e-ab12cd-decode-0", "job_actor"]
    assert [name for name, _ in _choose(dict.fromkeys(names, "id"), "e", which)] == expected


def test_an_unknown_rank_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--rank: 'decode-7' is none of driver, decode-0"):
        _choose({"e-driver": "a", "e-decode-0": "b"}, "e", "decode-7")


def test_logs_are_those_of_the_ray_that_this_process_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would look for one, and refuse when it finds several on the machine."""
    logs = "deepinfer.launcher.logs"
    monkeypatch.setattr(f"{logs}.ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
    actor = SimpleNamespace(name="e-driver", actor_id="a", state="ALIVE")
    monkeypatch.setattr(f"{logs}.list_actors", lambda address, **_: [actor] if address == "here:1" else [])
    monkeypatch.setattr(f"{logs}.get_log", lambda address, **_: [f"said {address}"])
    assert list(read_logs(make_config("name=e"), which=None, num_lines=1)) == [("driver", "said here:1")]


SLOW = "echo The current node timed out during startup >&2"


def make_ssh(folder: Path, body: str) -> str:
    """A program in place of ssh: gets a host and a line of shell."""
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\nhost=$1; shift\necho "$host: $*" >> {folder}/log\n{body}\n')
    program.chmod(0o700)
    return str(program)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("echo 0.0.1 2.60.0 $host", ConfigError, "ray.hosts: one has deepinfer, ray 0.0.1 2.60.0, here are"),
        ("echo no route >&2; exit 255", ClusterError, "host one: exit code 255: no route"),
    ],
)
def test_hosts_are_checked_before_anything_is_started(
    tmp_path: Path, body: str, error: type[Exception], message: str
) -> None:
    config = make_config("ray.provider=ssh", "ray.hosts=[one, two]", f"ray.ssh_command=[{make_ssh(tmp_path, body)}]")
    with pytest.raises(error, match=message):
        start_on_hosts(config)
    assert " start " not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        ("{r: [one, six]}", "ray.domains: 'six' of domain 'r' is none of ray.hosts"),
        ("{r: [one], s: [two, one]}", "ray.domains: 'one' stands in 'r' and in 's'"),
        ("{'a,b': [one]}", "ray.domains: 'a,b' is no label"),
    ],
)
def test_domains_are_checked_before_hosts_are_asked(domains: str, message: str) -> None:
    config = make_config("ray.provider=ssh", "ray.hosts=[one, two]", f"ray.domains={domains}")
    with pytest.raises(ConfigError, match=message):
        start_on_hosts(config)


def test_hosts_of_a_domain_carry_its_label() -> None:
    config = make_config("ray.provider=ssh", "ray.hosts=[one, two, six]", "ray.domains={r: [one], s: [two]}")
    record = host_record(config, folder="/tmp/f")
    labels = {
        host: [part for part in host_arguments(config, record, host) if "label" in part] for host in config.ray.hosts
    }
    assert labels == {
        "one": ["--labels=ray.io/gpu-domain=r"],
        "two": ["--labels=ray.io/gpu-domain=s"],
        "six": [],
    }
    assert "--head" in host_arguments(config, record, "one")
    assert "--address=one:6379" in host_arguments(config, record, "two")


def test_a_rank_s_domain_is_that_of_its_node() -> None:
    ranks = {"decode-0": {"node": "one"}, "decode-1": {"node": "two"}, "prefill-0": {"node": "six"}}
    nodes = [
        {"NodeManagerHostname": "one", "Alive": True, "Labels": {"ray.io/gpu-domain": "r"}},
        {"NodeManagerHostname": "two", "Alive": True, "Labels": {}},
        {"NodeManagerHostname": "two", "Alive": False, "Labels": {"ray.io/gpu-domain": "old"}},
    ]
    found = with_domains(ranks, nodes)
    assert found == {**ranks, "decode-0": {"node": "one", "domain": "r"}}


@pytest.mark.parametrize("domain", [{}, {"domain": "rack-1"}])
def test_the_table_of_ranks_has_a_domain_where_there_is_one(domain: dict[str, str]) -> None:
    rank = {"node": "one", "device": "cpu", "pid": 7, "num_loads": 1, **domain}
    console = Console(width=200, file=io.StringIO())
    console.print(rank_table({"ranks": {"decode-0": rank}, "loads": {}}))
    head, line = console.file.getvalue().splitlines()
    assert head.split()[:4] == ["rank", "node", *(["domain"] if domain else []), "device", "pid"][:4]
    assert line.split()[:4] == ["decode-0", "one", *domain.values(), "cpu", "7"][:4]


def test_a_head_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    body = f"""
case "$*" in
  *" start "*) echo port is taken >&2; exit 1;;
  *stop_processes*) rm -r "${{*##* }}"; exit;;
  *"import deepinfer, ray"*) echo {__version__} 2.60.0 $host;;
  *) exec sh -c "$*";;
esac"""
    config = make_config("ray.provider=ssh", "ray.hosts=[one, two]", f"ray.ssh_command=[{make_ssh(tmp_path, body)}]")
    with pytest.raises(ClusterError, match="host one: exit code 1: port is taken"):
        start_on_hosts(config)
    [folder] = set(re.findall(r"/tmp/deepinfer-up-\w+", (tmp_path / "log").read_text()))
    assert not Path(folder).exists()


def test_a_slow_host_is_cleared_and_started_again(tmp_path: Path) -> None:
    body = f"""
case "$*" in
  *" start --address"*) [ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; {SLOW}; exit 1; }};;
  *" start --head"* | *stop_processes*) ;;
  *"import deepinfer, ray"*) echo {__version__} 2.60.0 $host;;
  *) exec sh -c "$*";;
esac"""
    config = make_config("ray.provider=ssh", "ray.hosts=[one, two]", f"ray.ssh_command=[{make_ssh(tmp_path, body)}]")
    record = start_on_hosts(config)
    log = [line for line in (tmp_path / "log").read_text().splitlines() if "import deepinfer" not in line]
    steps = {"cat >": "token", " start ": "start", "stop_processes": "stop"}
    did = [(line[:3], name) for line in log for sign, name in steps.items() if sign in line]
    assert did == [
        ("one", "token"), ("one", "start"), ("two", "token"), ("two", "start"), ("two", "stop"), ("two", "token"),
        ("two", "start"),
    ]  # fmt: skip
    assert stop_on_hosts(record, config.ray) == []


def test_a_host_that_is_gone_does_not_keep_the_others_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = "[ $host != two ] || { echo no route >&2; exit 255; }"
    config = make_config(
        "ray.provider=ssh", "ray.hosts=[one, two, six]", f"ray.ssh_command=[{make_ssh(tmp_path, body)}]"
    )
    assert stop_on_hosts(host_record(config, folder=str(tmp_path / "none")), config.ray) == []
    log = (tmp_path / "log").read_text().splitlines()
    assert {line[:3] for line in log if "stop_processes" in line} == {"one", "two", "six"}
    [warning] = [record.message for record in caplog.records]
    assert warning.endswith("host two: exit code 255: no route")


def test_hosts_are_reached_at_the_address_that_this_machine_knows_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would take the head's address towards the internet."""
    config = make_config("ray.provider=ssh", "ray.hosts=[10.1.2.3, me@node, alias, localhost]")
    known = {"10.1.2.3": "10.1.2.3", "node": "10.1.2.4", "localhost": "127.0.0.1"}

    def look_up(name: str) -> str:
        if name not in known:
            raise OSError
        return known[name]

    monkeypatch.setattr("deepinfer.launcher.ssh.socket.gethostbyname", look_up)
    record = host_record(config, folder="/tmp/f")
    options = [
        [part for part in host_arguments(config, record, host) if "node-ip" in part] for host in config.ray.hosts
    ]
    assert options == [["--node-ip-address=10.1.2.3"], ["--node-ip-address=10.1.2.4"], [], []]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hosts_over_a_false_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hosts are this machine; what runs on them is real."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    ssh = make_ssh(tmp_path, 'exec sh -c "$*"')
    config = make_config(
        "ray.provider=ssh", "ray.hosts=[127.0.0.1, localhost]", f"ray.ssh_command=[{ssh}]", "ray.port=36391",
        "ray.dashboard_port=36392", "ray.object_store_bytes=80000000",
    )  # fmt: skip
    record = start_on_hosts(config)
    try:
        log = (tmp_path / "log").read_text()
        assert "127.0.0.1: env RAY_AUTH_MODE=token" in log
        assert "--address=127.0.0.1:36391" in log
        assert (Path(str(record.folder)) / "token").stat().st_mode & 0o077 == 0
    finally:
        left = stop_on_hosts(record, config.ray)
    assert left == []
    assert not Path(str(record.folder)).exists()


@pytest.mark.parametrize(
    ("errors", "num_starts", "fails"),
    [
        ([], 1, False),
        (["The current node timed out during startup"] * 2, 3, False),
        (["The current node timed out during startup"] * 3, 3, True),
        (["the port is taken"], 1, True),
    ],
)
def test_only_slow_starts_of_ray_are_tried_again(errors: list[str], num_starts: int, fails: bool) -> None:
    starts = 0

    def start() -> str:
        nonlocal starts
        starts += 1
        if starts <= len(errors):
            raise ClusterError(errors[starts - 1])
        return "started"

    if fails:
        with pytest.raises(ClusterError, match=errors[-1]):
            start_patiently(start)
    else:
        assert start_patiently(start) == "started"
    assert starts == num_starts


def test_processes_of_a_failed_start_are_ended_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their handles must not warn later, wherever the garbage collector happens to run."""
    pids: list[int] = []

    def init(_temp_dir: str, **_: object) -> None:
        handle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"{_temp_dir}/ray/raylet"])
        pids.append(handle.pid)
        try:
            raise RuntimeError("not there yet")
        except RuntimeError:
            raise Exception("The current node timed out during startup.")  # noqa: B904  as Ray does

    monkeypatch.setattr("deepinfer.launcher.local.ray.init", init)
    monkeypatch.setattr("deepinfer.launcher.local.ray.is_initialized", lambda: False)  # other tests may have a Ray
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ClusterError, match="timed out during startup"):
            open_ray(make_config())
        gc.collect()
    assert len(pids) == 3
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert [warning.message for warning in caught if warning.category is ResourceWarning] == []


def test_a_start_is_told_in_one_line() -> None:
    """Few ranks one by one, many in one phase by their first."""
    few = {"prefill-0": "loading code", "decode-0": "loading weights: 1.0 of 2.0 GiB"}
    assert summarize(few) == "prefill-0: loading code, decode-0: loading weights: 1.0 of 2.0 GiB"
    many = {f"decode-{rank}": f"loading weights: {rank}.0 of 90.0 GiB" for rank in range(64)}
    assert summarize({**few, **many}) == (
        "prefill-0: loading code, 64 ranks like decode-0: loading weights: 0.0 of 90.0 GiB"
    )
