"""Engines of fake ranks on a local Ray, and the requests and answers of their tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from deepinfer.actors.engine_facts import EngineFacts
from deepinfer.actors.rank_life import RankProgram
from deepinfer.client import EngineClient, Job
from deepinfer.codec import pack, unpack
from deepinfer.config import ClusterConfig, load_config, resolve
from deepinfer.protocol import FinishCode, Request, RequestOutput, SamplingParams

FAKE_PROGRAM = RankProgram(build="support.fake_engine:build", open_store="support.fake_engine:open_store")
TESTS = Path(__file__).parent.parent


def small_config(*, prefill: int = 1, decode: int = 1, **scheduler: Any) -> ClusterConfig:
    """A resolved CPU config of few ranks with a small object store; `scheduler` overrides that section."""
    settings = [
        f"prefill.ranks={prefill}",
        f"decode.ranks={decode}",
        "ray.object_store_bytes=157286400",
        "observability.metrics_interval_seconds=0.5",
        *(f"scheduler.{name}={value}" for name, value in scheduler.items()),
    ]
    return resolve(load_config(settings=settings, environ={}).config, accelerator="cpu")


class Engine:
    """A running engine of fake ranks."""

    def __init__(self, driver: Any, facts: EngineFacts) -> None:
        self.driver = driver
        self.facts = facts
        self.client = EngineClient(driver, facts)

    def rank(self, role: str, rank: int) -> Any:
        return ray.get_actor(f"{self.facts.name}-{role}-{rank}")


def wait_for_requests(driver: Any, **wanted: int) -> None:
    """Wait, 20 seconds at most, until the driver's counts of requests are the `wanted` ones."""
    deadline = time.monotonic() + 20
    while True:
        counts = ray.get(driver.status.remote())["requests"]
        found = {name: counts[name] for name in wanted}
        if found == wanted:
            return
        assert time.monotonic() < deadline, f"{found} instead of {wanted}"
        time.sleep(0.02)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for a while; a Ray that is started meanwhile hands them to its workers."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make_request(
    request_id: str, prompt: list[int], *, max_tokens: int = 12, n: int = 1, stream: bool = False
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=pack(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, n=n),
        num_samples=n,
        stream=stream,
    )


def collect(job: Job, num_sequences: int, *, seconds: float = 30.0) -> list[RequestOutput]:
    """Fetch until `num_sequences` sequences have ended."""
    outputs: list[RequestOutput] = []
    deadline = time.monotonic() + seconds
    while sum(output.finish is not FinishCode.NONE for output in outputs) < num_sequences:
        assert time.monotonic() < deadline, f"only {len(outputs)} outputs came"
        outputs += job.next_outputs(0.5).outputs
    return outputs


def tokens_of(outputs: Iterable[RequestOutput]) -> dict[tuple[str, int], list[int]]:
    answers: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        assert output.error is None, output.error
        known = answers.setdefault((output.request_id, output.sample), [])
        assert output.first_position == len(known)
        known += unpack(output.token_ids).tolist()
    return answers
