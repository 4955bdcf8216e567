"""Ranks that die, hang, break or never come up: nothing hangs, no answer is lost, the cause is named."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import pytest
import ray
from support.fake_cluster import collect, make_request, small_config, tokens_of
from support.fake_engine import FAULT, Fault, expected_tokens
from support.pids import runs

from deepinfer.errors import CheckpointError, ClusterError, ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def pids_of(engine) -> list[int]:
    return [ready.pid for ready in engine.facts.ranks]


def restarts_of(engine) -> dict[str, int]:
    return ray.get(engine.driver.status.remote(), timeout=10)["restarts"]


def cause_of(error: ray.exceptions.RayTaskError) -> BaseException:
    return error.cause


def test_killed_ranks_come_back_and_every_request_is_answered_once(start_engine) -> None:
    engine = start_engine(small_config(prefill=2, decode=2))
    first_pids = pids_of(engine)
    job = engine.client.open_job()
    for fault in (Fault.KILL_ONCE, Fault.KILL_PREFILL_ONCE):  # a request that lost its rank twice would fail
        prompts = {f"r{i}": [1, i] for i in range(30)}
        job.submit([make_request(name, prompt, max_tokens=400) for name, prompt in prompts.items()])
        prompts["killer"] = [FAULT, fault, 1]
        job.submit([make_request("killer", prompts["killer"], max_tokens=400)])
        answers = tokens_of(collect(job, len(prompts), seconds=90))
        assert answers == {(name, 0): expected_tokens(prompt, 0, 0, 400) for name, prompt in prompts.items()}
    assert restarts_of(engine) == {"prefill": 1, "decode": 1}
    assert not [pid for pid in first_pids if runs(pid)], "a rank of the lost groups is still there"
    job.close()


def test_hanging_ranks_are_found_and_fenced(start_engine) -> None:
    engine = start_engine(small_config(prefill=1, decode=2, step_timeout_seconds=3))
    job = engine.client.open_job()
    job.submit([make_request("hang", [FAULT, Fault.HANG_ONCE], max_tokens=5)])
    assert tokens_of(collect(job, 1, seconds=60)) == {("hang", 0): expected_tokens([FAULT, Fault.HANG_ONCE], 0, 0, 5)}
    assert restarts_of(engine) == {"prefill": 0, "decode": 1}

    pid = ray.get(engine.rank("prefill", 0).probe.remote(), timeout=10).pid
    os.kill(pid, signal.SIGSTOP)
    job.submit([make_request("frozen", [1, 2], max_tokens=5)])
    assert tokens_of(collect(job, 1, seconds=60)) == {("frozen", 0): expected_tokens([1, 2], 0, 0, 5)}
    assert restarts_of(engine) == {"prefill": 1, "decode": 1}
    assert not runs(pid)
    job.close()


def test_a_request_that_breaks_its_rank_fails_alone_and_in_the_end_the_engine_says_why(start_engine) -> None:
    """P60: the inner cause is in the row's error and in the engine's."""
    engine = start_engine(small_config())
    job = engine.client.open_job()
    job.submit([make_request("poison", [FAULT, Fault.RAISE])])
    output = collect(job, 1, seconds=60)[0]
    assert "decode rank 0" in output.error.text
    assert "the fake device is on fire" in output.error.text
    job.submit([make_request("fine", [1, 2])])
    assert tokens_of(collect(job, 1, seconds=60)) == {("fine", 0): expected_tokens([1, 2], 0, 0, 12)}
    job.submit([make_request("more poison", [FAULT, Fault.RAISE, 1])])
    with pytest.raises(ClusterError, match=r"decode rank 0: .*the fake device is on fire.*giving up"):
        collect(job, 1, seconds=60)


def test_a_broken_checkpoint_stops_the_start_and_leaves_nothing(start_engine) -> None:
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        start_engine(small_config(prefill=1, decode=2), directory="/models/broken")
    assert isinstance(cause_of(caught.value), CheckpointError)
    assert str(cause_of(caught.value)) == "tensor layers.0.attn.wkv.weight is missing"
    wait_for_free_places(at_least=3)


def test_impossible_placement_fails_in_time_and_names_asked_and_free(start_engine) -> None:
    """P47: no waiting for ever for places that will not come."""
    begin = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        start_engine(small_config(prefill=1, decode=50, placement_timeout_seconds=2))
    assert time.monotonic() - begin < 30
    assert isinstance(cause_of(caught.value), ConfigError)
    assert "decode.ranks" in str(cause_of(caught.value))
    assert "asked for 50 CPU" in str(cause_of(caught.value))
    assert "of 10 CPU" in str(cause_of(caught.value))
    wait_for_free_places(at_least=1)


def wait_for_free_places(*, at_least: int) -> None:
    deadline = time.monotonic() + 10
    while ray.available_resources().get("CPU", 0) < at_least:
        assert time.monotonic() < deadline, "the places were not given back"
        time.sleep(0.2)


def test_nodes_of_another_shape_are_refused_with_what_was_found(start_engine) -> None:
    config = small_config(prefill=1, decode=24, placement_timeout_seconds=2)
    config = msgspec.structs.replace(config, decode=msgspec.structs.replace(config.decode, ranks_per_node=12))
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        start_engine(config)
    assert isinstance(cause_of(caught.value), ConfigError)
    assert "asked for 2 nodes with 12 CPU each" in str(cause_of(caught.value))
    assert "on 1 node(s) (1 node with 10)" in str(cause_of(caught.value))
