"""The driver of a shared engine dies, and the next one takes its ranks over."""

from __future__ import annotations

import os
import secrets
import signal
import time

import msgspec
import pytest
import ray
from support.fake_cluster import FAKE_PROGRAM, Engine, collect, make_request, small_config, tokens_of
from support.fake_engine import FAULT, Fault, expected_tokens
from support.pids import runs

from deepinfer.actors.adoption import find_groups
from deepinfer.actors.names import find_places, rank_name
from deepinfer.client import Job
from deepinfer.config import ClusterConfig
from deepinfer.errors import ClusterError, ConfigError
from deepinfer.launcher import find_driver, revive
from deepinfer.launcher.engine import start_engine, stop_engine
from deepinfer.launcher.orphans import end_orphans
from deepinfer.protocol import FinishCode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(150)]


@pytest.fixture
def up(local_ray: None):
    """Bring shared engines of fake ranks up; all that lives of them ends with the test."""
    configs: list[ClusterConfig] = []

    def bring_up(config: ClusterConfig) -> Engine:
        config = msgspec.structs.replace(config, name=f"shared-{secrets.token_hex(3)}")
        configs.append(config)
        started = start_engine(config, name=config.name, model_directory="/none", program=FAKE_PROGRAM, detached=True)
        return Engine(*started)

    yield bring_up
    for config in configs:
        driver = find_driver(config.name, namespace="deepinfer")
        if driver is not None:
            stop_engine(driver)
        end_orphans(config)


def kill_driver(engine: Engine) -> None:
    os.kill(ray.get(engine.driver.status.remote(), timeout=20)["pid"], signal.SIGKILL)
    wait_until(lambda: find_driver(engine.facts.name, namespace="deepinfer") is None)


def wait_until(is_so, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def fetch_for_ever(job: Job) -> None:
    while True:
        job.next_outputs(0.5)


def take_over(engine: Engine) -> Engine:
    assert revive(engine.facts.config, "fake")
    driver = find_driver(engine.facts.name, namespace="deepinfer")
    return Engine(driver, ray.get(driver.facts.remote(), timeout=20))


def status_of(engine: Engine) -> dict:
    return ray.get(engine.driver.status.remote(), timeout=20)


def answer(engine: Engine, name: str, count: int = 1) -> None:
    """Have the engine answer some requests, and check the answers."""
    job = engine.client.open_job()
    prompts = {f"{name}{i}": [5, i] for i in range(count)}
    job.submit([make_request(request_id, prompt) for request_id, prompt in prompts.items()])
    wanted = {(request_id, 0): expected_tokens(prompt, 0, 0, 12) for request_id, prompt in prompts.items()}
    assert tokens_of(collect(job, count, seconds=60)) == wanted
    job.close()


def test_ranks_are_kept_and_their_old_work_is_dropped(up) -> None:
    engine = up(small_config(prefill=2, decode=2))
    before = status_of(engine)["ranks"]
    dead = engine.client.open_job()
    dead.submit([make_request(f"old{i}", [3, i], max_tokens=4000) for i in range(100)])
    while not any(rank["num_decoding"] for rank in [status_of(engine)["requests"]]):
        time.sleep(0.05)
    kill_driver(engine)
    with pytest.raises(ClusterError, match="the driver has failed"):
        fetch_for_ever(dead)

    again = take_over(engine)
    assert again.facts.ranks == engine.facts.ranks
    status = status_of(again)
    assert status["ranks"] == before, "same pids, and no second load"
    assert (status["epoch"], status["restarts"]) == (2, {"prefill": 0, "decode": 0})
    job = again.client.open_job()
    prompts = {f"new{i}": [4, i] for i in range(200)}
    job.submit([make_request(name, prompt) for name, prompt in prompts.items()])
    outputs = collect(job, 200, seconds=60)
    assert tokens_of(outputs) == {(name, 0): expected_tokens(prompt, 0, 0, 12) for name, prompt in prompts.items()}
    assert sum(output.finish is not FinishCode.NONE for output in outputs) == 200
    assert {output.decode_rank for output in outputs} == {0, 1}
    for role in ("prefill", "decode"):
        for rank in range(2):
            assert ray.get(again.rank(role, rank).status.remote(), timeout=10)["parked"]
    job.close()
    kill_driver(again)  # and once more, now without work
    third = take_over(again)
    answer(third, "third")
    assert status_of(third)["ranks"] == before


def test_a_group_that_has_lost_a_rank_is_started_again_and_the_other_one_kept(up) -> None:
    engine = up(small_config(prefill=1, decode=2))
    before = status_of(engine)["ranks"]
    os.kill(status_of(engine)["pid"], signal.SIGSTOP)  # so that the old driver can't repair it
    os.kill(before["decode-1"]["pid"], signal.SIGKILL)
    wait_until(lambda: not runs(before["decode-1"]["pid"]))
    ray.kill(engine.driver)
    wait_until(lambda: find_driver(engine.facts.name, namespace="deepinfer") is None)
    again = take_over(engine)
    after = status_of(again)["ranks"]
    assert after["prefill-0"] == before["prefill-0"]
    assert [after[f"decode-{rank}"]["num_loads"] for rank in range(2)] == [2, 2]
    assert not runs(before["decode-0"]["pid"])
    answer(again, "after", 20)


def test_another_engine_than_asked_for_is_refused_and_left_alone(up) -> None:
    engine = up(small_config(prefill=1, decode=1))
    kill_driver(engine)
    config = engine.facts.config
    other = msgspec.structs.replace(config, decode=msgspec.structs.replace(config.decode, max_running=3))
    with pytest.raises(ConfigError, match=r"decode\.max_running: the engine has 64, this job asks for 3"):
        revive(other, "fake")
    with pytest.raises(ConfigError, match="the digest fake"):
        revive(config, "another")
    assert status_of(take_over(engine))["ranks"] == {
        f"{ready.role}-{ready.rank}": {
            "node": ready.node, "device": "fake", "pid": ready.pid, "num_loads": 1, "num_blocks": ready.num_blocks,
        }
        for ready in engine.facts.ranks
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_without_a_driver_end_in_time_and_give_their_places_back(up) -> None:
    engine = up(small_config(prefill=1, decode=2, orphan_timeout_seconds=6.0))
    time.sleep(9.0)
    answer(engine, "idle")  # a driver that has nothing to say is not gone
    pids = [ready.pid for ready in engine.facts.ranks]
    name = engine.facts.name
    kill_driver(engine)
    wait_until(lambda: not any(runs(pid) for pid in pids))
    wait_until(lambda: not any(group.actors for group in find_groups(name, namespace="deepinfer").values()))
    wait_until(lambda: find_places(name, "prefill") is None and find_places(name, "decode") is None)
    assert not revive(engine.facts.config, "fake")


def test_a_rank_that_died_while_nobody_watched_is_named(up, capfd: pytest.CaptureFixture[str]) -> None:
    engine = up(small_config(prefill=1, decode=2))
    kill_driver(engine)
    os.kill(engine.facts.ranks[2].pid, signal.SIGKILL)
    name = rank_name(engine.facts.name, "decode", 1)
    wait_until(lambda: name not in [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)])
    groups = find_groups(engine.facts.name, namespace="deepinfer")
    source = groups["decode"].states[0].source
    assert groups["decode"].obstacle(source, 2) == "decode-1 is gone"
    assert groups["prefill"].obstacle(source, 1) is None
    assert groups["prefill"].obstacle(source, 2) == "prefill-0 is one of 1 ranks, wanted are 2"
    other = msgspec.structs.replace(source, model_directory="/elsewhere")
    assert groups["prefill"].obstacle(other, 1) == "prefill-0 was loaded with other settings"
    end_orphans(engine.facts.config)  # as `down` does
    assert not [ready.pid for ready in engine.facts.ranks if runs(ready.pid)]
    assert find_places(engine.facts.name, "prefill") is None
    assert find_places(engine.facts.name, "decode") is None


def test_a_driver_that_was_only_cut_off_leaves_the_ranks_to_its_successor(up) -> None:
    engine = up(small_config(prefill=1, decode=2))
    job = engine.client.open_job()
    job.submit([make_request("old", [3], max_tokens=4000)])
    actors = [engine.rank(ready.role, ready.rank) for ready in engine.facts.ranks]
    ray.get([actor.adopt.remote(5, 5 << 32) for actor in actors], timeout=20)
    with pytest.raises(ClusterError, match=r"this driver \(epoch 1\) is not obeyed: .* the one of epoch 5"):
        fetch_for_ever(job)
    assert status_of(engine)["state"] == "failed"
    ray.get(engine.driver.stop.remote(), timeout=30)
    kill_driver(engine)
    again = take_over(engine)
    assert status_of(again)["epoch"] == 6
    assert again.facts.ranks == engine.facts.ranks
    answer(again, "after", 5)


@pytest.mark.slow
def test_a_rank_that_breaks_is_named_with_its_cause_in_a_shared_job(up) -> None:
    """P60: a job hears what broke inside a rank, in its rows and at the end of the engine."""
    engine = up(small_config())
    job = engine.client.open_job()
    job.submit([make_request("poison", [FAULT, Fault.RAISE])])
    output = collect(job, 1, seconds=90)[0]
    assert "decode rank 0: ValueError: the fake device is on fire" in output.error.text
    job.submit([make_request("poison", [FAULT, Fault.RAISE])])
    with pytest.raises(ClusterError, match="ValueError: the fake device is on fire; the group was restarted 2 times"):
        fetch_for_ever(job)
