"""An engine that outlives its clients: dead ones are noticed, living ones are not disturbed, draining loses nothing."""

from __future__ import annotations

import secrets
import time

import msgspec
import pytest
import ray
from support.fake_cluster import FAKE_PROGRAM, Engine, collect, make_request, small_config, tokens_of
from support.fake_engine import expected_tokens

from deepinfer.actors.driver import create_driver
from deepinfer.client import EngineClient, Job
from deepinfer.config import encode_config
from deepinfer.errors import ClusterError
from deepinfer.protocol import RequestOutput

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


@pytest.fixture
def start_shared(local_ray: None):
    drivers = []

    def start(**scheduler: float) -> Engine:
        name = f"shared-{secrets.token_hex(3)}"
        config = msgspec.structs.replace(small_config(**scheduler), name=name)
        driver = create_driver(config, name=name, detached=True)
        drivers.append(driver)
        return Engine(driver, ray.get(driver.start.remote(encode_config(config), "/none", FAKE_PROGRAM), timeout=60))

    yield start
    for driver in drivers:
        ray.get(driver.stop.remote(), timeout=30)
        ray.kill(driver)


def open_requests(engine: Engine) -> dict[str, int]:
    return ray.get(engine.driver.status.remote(), timeout=10)["jobs"]


def fetch_all(job: Job, outputs: list[RequestOutput]) -> None:
    while True:
        outputs += job.next_outputs(0.2).outputs


def test_a_silent_client_loses_its_requests_and_hears_why(start_shared) -> None:
    engine = start_shared(job_timeout_seconds=1.0)
    dead = Job(engine.driver)
    dead.submit([make_request(f"long{i}", [3, i], max_tokens=4000) for i in range(4)])
    assert dead.next_outputs(0.0).outputs == ()  # the driver has them
    assert list(open_requests(engine).values()) == [4]
    deadline = time.monotonic() + 20
    while open_requests(engine) != {}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(ClusterError, match=r"heard nothing of this job for 1 s \(scheduler.job_timeout_seconds\)"):
        dead.next_outputs(1.0)
    alive = Job(engine.driver)
    alive.submit([make_request("next", [5])])
    assert tokens_of(collect(alive, 1)) == {("next", 0): expected_tokens([5], 0, 0, 12)}
    alive.close()


def test_a_caller_that_thinks_for_long_is_not_taken_for_dead(start_shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.client.connection._BEAT_SECONDS", 0.3)
    engine = start_shared(job_timeout_seconds=2.0)
    job = EngineClient.connect(engine.facts.name, namespace="deepinfer").open_job()
    job.submit([make_request("patient", [7])])
    time.sleep(4.0)
    assert tokens_of(job.next_outputs(1.0).outputs) == {("patient", 0): expected_tokens([7], 0, 0, 12)}
    job.close()


def test_draining_finishes_what_has_started_and_the_rest_hears_of_it(start_shared) -> None:
    engine = start_shared(max_in_flight=500)
    job = engine.client.open_job()
    job.submit([make_request(f"r{i}", [4, i], max_tokens=60) for i in range(300)])
    outputs = list(job.next_outputs(5.0).outputs)
    drained = engine.driver.drain.remote(20.0)
    while not ray.wait([drained], timeout=0)[0]:
        outputs += job.next_outputs(0.2).outputs
    assert ray.get(drained) == 0
    ray.get(engine.driver.stop.remote(), timeout=30)
    with pytest.raises(ClusterError, match="stopped"):
        fetch_all(job, outputs)
    answers = tokens_of(outputs)
    assert 0 < len(answers) < 300
    assert all(tokens == expected_tokens([4, int(name[1:])], 0, 0, 60) for (name, _), tokens in answers.items())
    with pytest.raises(ClusterError, match="is stopped"):
        EngineClient.connect(engine.facts.name, namespace="deepinfer")


def test_status_tells_ranks_apart_and_counts_their_loads(start_shared) -> None:
    engine = start_shared()
    ranks = ray.get(engine.driver.status.remote(), timeout=10)["ranks"]
    assert {name: entry["num_loads"] for name, entry in ranks.items()} == {"prefill-0": 1, "decode-0": 1}
    victim = ranks["decode-0"]["pid"]
    ray.kill(engine.rank("decode", 0))
    job = engine.client.open_job()
    job.submit([make_request("after", [9])])
    collect(job, 1, seconds=60)
    again = ray.get(engine.driver.status.remote(), timeout=10)["ranks"]
    assert {name: entry["num_loads"] for name, entry in again.items()} == {"prefill-0": 1, "decode-0": 2}
    assert again["decode-0"]["pid"] != victim
    assert again["prefill-0"]["pid"] == ranks["prefill-0"]["pid"]
    job.close()
