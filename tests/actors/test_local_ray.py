"""The private Ray: what it sets, what it takes away again, and that it dies with its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from support.fake_cluster import small_config

from deepinfer.errors import ClusterError
from deepinfer.launcher import open_ray
from deepinfer.launcher.local import _check_reachable, _remove_stale_folders, make_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

OWNER = """
import signal, time
import ray
from support.fake_cluster import small_config
from deepinfer.launcher import open_ray

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, interrupt)
connection = open_ray(small_config())

@ray.remote(num_cpus=0)
class Sleeper:
    def pid(self):
        import os
        return os.getpid()
    def sleep(self):
        time.sleep(3600)

sleeper = Sleeper.remote()
pid = ray.get(sleeper.pid.remote())
sleeper.sleep.remote()
print(pid, connection.folder, flush=True)
try:
    time.sleep(3600)
except KeyboardInterrupt:
    connection.close()
    print(ray.is_initialized(), connection.folder, flush=True)
"""


def start_owner() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "RAY_AUTH_MODE": "disabled"}
    return subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment)


def test_a_ray_that_is_in_use_already_is_left_alone(local_ray: None) -> None:
    connection = open_ray(small_config())
    connection.close()
    assert ray.is_initialized()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_an_address_is_attached_to_and_left_running(local_ray: None) -> None:
    code = "\n".join(
        [
            "from support.fake_cluster import small_config",
            "from deepinfer.launcher import open_ray",
            "import ray",
            "connection = open_ray(small_config())",
            "print(ray.cluster_resources()['CPU'])",
            "connection.close()",
            "print(ray.is_initialized())",
        ]
    )
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["10.0", "False"]
    assert ray.cluster_resources()["CPU"] == 10


def test_an_address_where_nobody_listens_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ClusterError, match=rf"can't reach Ray at 127\.0\.0\.1:{port}"):
        _check_reachable(f"127.0.0.1:{port}")


def test_sigterm_stays_the_owners_and_close_takes_everything_away() -> None:
    """Ray would take the signal over and abort, so that a batch system could not end a job as Ctrl-C does."""
    with start_owner() as owner:
        pid, folder = owner.stdout.readline().split()
        children = psutil.Process(owner.pid).children(recursive=True)
        assert int(pid) in {child.pid for child in children}
        owner.terminate()
        assert owner.stdout.readline().split() == ["False", "None"]
        assert owner.wait(30) == 0
    assert not Path(folder).exists()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.slow
def test_a_killed_owner_leaves_no_rank_and_its_folder_goes_with_the_next_start() -> None:
    with start_owner() as owner:
        pid, folder = owner.stdout.readline().split()
        children = psutil.Process(owner.pid).children(recursive=True)
        # Ray's two agents look for their raylet only now and then, and go within two minutes.
        prompt = [child for child in children if not child.name().startswith(("ray::Dashboard", "ray::RuntimeEnv"))]
        assert int(pid) in {child.pid for child in prompt}
        os.kill(owner.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(prompt, timeout=30)
        assert not alive, f"still there: {alive}"
    _remove_stale_folders(Path(folder).parent)
    assert not Path(folder).exists()


def test_folders_of_living_owners_stay(tmp_path: Path) -> None:
    short = Path(os.path.relpath(tmp_path))
    parent = short if len(str(short)) < 20 else Path("/tmp")
    folder = make_folder(parent, f"deepinfer-ray-{os.getpid()}-living")
    try:
        _remove_stale_folders(folder.parent)
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
    finally:
        (folder / "token").unlink()
        folder.rmdir()
