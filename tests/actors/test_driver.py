"""The driver with 2 + 4 fake ranks: answers, aborts, jobs side by side, and how the ranks were started."""

from __future__ import annotations

import time

import msgspec
import pytest
import ray
from support.fake_cluster import collect, make_request, tokens_of, wait_for_requests
from support.fake_engine import FAULT, Fault, expected_tokens

from deepinfer.protocol import FinishCode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


def test_every_request_is_answered_once_with_its_own_tokens(shared_engine) -> None:
    job = shared_engine.client.open_job()
    prompts = {f"r{i}": [1, 2 + i % 7, 3, i] for i in range(200)}
    for start in range(0, 200, 50):
        job.submit([make_request(f"r{i}", prompts[f"r{i}"]) for i in range(start, start + 50)])
    outputs = collect(job, 200)
    assert tokens_of(outputs) == {(name, 0): expected_tokens(prompt, 0, 0, 12) for name, prompt in prompts.items()}
    assert {output.finish for output in outputs} == {FinishCode.LENGTH}
    assert {output.decode_rank for output in outputs} == {0, 1, 2, 3}
    assert {output.prefill_rank for output in outputs} == {0, 1}
    assert len({output.seed for output in outputs}) == 200
    assert job.next_outputs(0.0).outputs == ()
    job.close()


def test_samples_share_a_prefill(shared_engine) -> None:
    job = shared_engine.client.open_job()
    job.submit([make_request("a", [5, 6, 7], n=3), make_request("b", [8], max_tokens=1)])
    answers = tokens_of(collect(job, 4))
    assert answers == {
        **{("a", sample): expected_tokens([5, 6, 7], sample, 0, 12) for sample in range(3)},
        ("b", 0): expected_tokens([8], 0, 0, 1),
    }
    job.close()


def test_streamed_tokens_come_in_pieces(shared_engine) -> None:
    job = shared_engine.client.open_job()
    job.submit([make_request("s", [9, 9], max_tokens=200, stream=True)])
    outputs = collect(job, 1)
    assert len(outputs) > 2
    assert tokens_of(outputs) == {("s", 0): expected_tokens([9, 9], 0, 0, 200)}
    job.close()


def test_jobs_may_use_the_same_ids_at_the_same_time(shared_engine) -> None:
    """P07: each job hears of its own requests."""
    jobs = [shared_engine.client.open_job() for _ in range(2)]
    for number, job in enumerate(jobs):
        job.submit([make_request(f"same-{i}", [number + 1, i]) for i in range(50)])
    for number, job in enumerate(jobs):
        wanted = {(f"same-{i}", 0): expected_tokens([number + 1, i], 0, 0, 12) for i in range(50)}
        assert tokens_of(collect(job, 50)) == wanted
        job.close()


def test_an_id_in_use_is_refused_and_disturbs_nobody(shared_engine) -> None:
    """P08: the second of two live requests with one id is refused."""
    job = shared_engine.client.open_job()
    job.submit([make_request("twice", [1, 1], max_tokens=1000)])
    assert job.next_outputs(0.0).outputs == ()  # the driver has it
    job.submit([make_request("twice", [2, 2])])
    outputs = collect(job, 2)
    refused = [output for output in outputs if output.error is not None]
    assert [output.error.kind for output in refused] == ["duplicate_request_id"]
    assert tokens_of(output for output in outputs if output.error is None) == {
        ("twice", 0): expected_tokens([1, 1], 0, 0, 1000)
    }
    job.close()


def test_a_failed_request_leaves_the_others_alone(shared_engine) -> None:
    job = shared_engine.client.open_job()
    job.submit([make_request("bad", [FAULT, Fault.FAIL_REQUEST]), make_request("good", [4])])
    outputs = {output.request_id: output for output in collect(job, 2)}
    assert "NaN" in outputs["bad"].error.text
    assert tokens_of([outputs["good"]]) == {("good", 0): expected_tokens([4], 0, 0, 12)}
    job.close()


def test_aborted_requests_end_at_once_and_free_their_places(shared_engine) -> None:
    job = shared_engine.client.open_job()
    job.submit([make_request(f"long{i}", [3, i], max_tokens=4000) for i in range(8)])
    wait_for_requests(shared_engine.driver, num_decoding=8)
    job.submit([make_request("short", [6])], aborted_ids=[f"long{i}" for i in range(8)])
    assert tokens_of(collect(job, 1)) == {("short", 0): expected_tokens([6], 0, 0, 12)}
    status = ray.get(shared_engine.driver.status.remote())
    assert status["requests"]["num_decoding"] == 0
    job.close()


def test_closing_a_job_frees_what_it_has(shared_engine) -> None:
    job = shared_engine.client.open_job()
    job.submit([make_request(f"left{i}", [3, i], max_tokens=4000) for i in range(8)])
    wait_for_requests(shared_engine.driver, num_decoding=8)
    job.close()
    wait_for_requests(shared_engine.driver, num_waiting=0, num_prefilling=0, num_prefilled=0, num_decoding=0)


def test_ranks_are_named_and_have_the_environment_of_the_starting_process(shared_engine) -> None:
    assert [(ready.role, ready.rank) for ready in shared_engine.facts.ranks] == [
        *(("prefill", rank) for rank in range(2)),
        *(("decode", rank) for rank in range(4)),
    ]
    for role, rank in (("prefill", 1), ("decode", 3)):
        status = ray.get(shared_engine.rank(role, rank).status.remote(), timeout=10)
        assert status["phase"] == "ready"
        assert status["environment"]["TEST_FROM_DRIVER"] == "seen"
        assert status["omp"] == "1"


def test_the_driver_spends_little_on_idle_ranks(shared_engine) -> None:
    before = ray.get(shared_engine.driver.status.remote())
    time.sleep(3.0)
    after = ray.get(shared_engine.driver.status.remote())
    share = (after["driver_cpu_seconds"] - before["driver_cpu_seconds"]) / 3.0
    print(f"driver CPU with 6 idle ranks: {100 * share:.1f} % of a core")
    assert share < 0.5


def test_facts_survive_the_way_to_a_client(shared_engine) -> None:
    facts = ray.get(shared_engine.driver.facts.remote())
    assert facts == shared_engine.facts
    assert msgspec.to_builtins(facts)["vocab_size"] == 512
