"""Real ranks on Ray that hand KV over through each other's memory: no answer depends on it, whoever dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from deepinfer.actors.kv_channel import may_share_memory
from deepinfer.actors.rank_life import RankProgram
from deepinfer.llm import LLM
from deepinfer.protocol import RankReady, SamplingParams

on_ray = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]
PROMPTS = [[7 + (n * k) % 300 for k in range(3 + 9 * n)] for n in range(12)]
PARAMS = [SamplingParams(max_tokens=40, seq_seed=n, n=1 + n % 2) for n in range(12)]


def ready(**fields: Any) -> RankReady:
    known = {"rank": 0, "role": "decode", "node": "a", "device": "cuda:0", "pid": 1, "num_blocks": {}, "num_slots": 1}
    digests = {"kernel_set": {}, "model_digest": "", "layout_digest": "", "version": ""}
    return RankReady(**{**known, **digests, **fields})


def test_ranks_of_one_host_and_kind_may_share_memory() -> None:
    assert may_share_memory([ready(), ready(device="cuda:3")])
    assert not may_share_memory([ready(), ready(node="b")])
    assert not may_share_memory([ready(), ready(device="cpu")])


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@contextmanager
def engine(cache_dir: str, num_bytes: int, program: RankProgram | None = None) -> Iterator[LLM]:
    settings = {
        "accelerator": "cpu",
        "prefill.ranks": 1,
        "decode.ranks": 2,
        "cache.handover_bytes": num_bytes,
        "cache_dir": cache_dir,
    }
    with LLM("tiny", settings=settings, rank_program=program or RankProgram()) as llm:
        yield llm


def answers_of(llm: LLM) -> list[list[list[int]]]:
    outs = llm.generate(PROMPTS, PARAMS)
    assert [out.error for out in outs] == [None] * len(outs)
    return [[answer.token_ids for answer in out.outputs] for out in outs]


def handovers(llm: LLM) -> dict[str, int]:
    """Return the counts of the prefill rank once all memory has come back to it."""
    actor = ray.get_actor(f"{llm._client.facts.name}-prefill-0", namespace="deepinfer")
    deadline = time.monotonic() + 20
    while (counts := ray.get(actor.status.remote())["handovers"])["lie"]:
        assert time.monotonic() < deadline, f"{counts}: memory of a prefill rank does not come back"
        time.sleep(0.05)
    return counts


def while_decoding(llm: LLM, do: Callable[[], None]) -> threading.Thread:
    def wait_and_do() -> None:
        while llm.status()["requests"]["num_decoding"] < 3:
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def expected(local_ray: None, cache_dir: str) -> list[list[list[int]]]:
    """The answers through the object store."""
    with engine(cache_dir, 0) as llm:
        answers = answers_of(llm)
        assert handovers(llm) == {"device": 0, "host": 12, "lie": 0}
    return answers


class TestOnRay:
    """What needs real ranks."""

    pytestmark = on_ray

    def test_neither_the_way_nor_a_killed_rank_changes_an_answer(
        self, expected: list[list[list[int]]], cache_dir: str
    ) -> None:
        with engine(cache_dir, 1 << 24) as llm:
            assert answers_of(llm) == expected
            assert handovers(llm) == {"device": 12, "host": 0, "lie": 0}
            for role in ("decode", "prefill"):
                victim = next(rank.pid for rank in llm._client.facts.ranks if rank.role == role)
                killer = while_decoding(llm, lambda pid=victim: os.kill(pid, signal.SIGKILL))
                assert answers_of(llm) == expected
                killer.join()
                counts = handovers(llm)
                assert counts["device"] > 0
                assert counts["host"] == 0
            assert llm.status()["restarts"] == {"prefill": 1, "decode": 1}

    def test_what_finds_no_room_goes_through_the_object_store(
        self, expected: list[list[list[int]]], cache_dir: str
    ) -> None:
        with engine(cache_dir, 1 << 17) as llm:
            assert answers_of(llm) == expected
            counts = handovers(llm)
            assert counts["device"] > 0
            assert counts["host"] > 0

    def test_memory_out_of_reach_costs_no_row(self, expected: list[list[list[int]]], cache_dir: str) -> None:
        with engine(cache_dir, 1 << 24, RankProgram(build="support.far_memory:build")) as llm:
            assert answers_of(llm) == expected
            first = handovers(llm)
            assert first["device"] > 0
            assert answers_of(llm) == expected
            assert handovers(llm)["device"] == first["device"], "it was tried again"
            assert llm.status()["restarts"] == {"prefill": 0, "decode": 0}
