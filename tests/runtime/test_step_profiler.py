"""Profiles of a working rank: whole steps, what they cost by operation, and a rank that goes on as if nothing was."""

from __future__ import annotations

import gzip
import json
import threading
from typing import Any

import pytest
import torch
from support.rank_engines import (
    Answer,
    RunningEngine,
    admission,
    build_fake_rank,
    make_request,
    run_decode,
    run_prefill,
)

from deepinfer.errors import DeepInferError
from deepinfer.protocol import StepProfile
from deepinfer.runtime.rank_engine import RankEngine


def _decode_while(engine: RankEngine, other: Any, *, max_tokens: int = 40) -> list[int]:
    """Answer one request on `engine` once `other` has begun; returns the tokens behind the first."""
    request = make_request(0, [5, 6, 7], max_tokens=max_tokens)
    with RunningEngine(build_fake_rank("prefill").engine) as prefill:
        done, _ = run_prefill(prefill, [request], wake_id=1)
    item, buffer = done[0]
    answers = {0: Answer()}
    with RunningEngine(engine) as running:
        other.start()
        run_decode(running, [(admission(request, item), buffer)], answers, wake_id=1)
        other.join(30.0)
    assert not other.is_alive()
    return answers[0].token_ids


class _Take(threading.Thread):
    """Takes a profile on a thread of its own, as Ray calls it."""

    def __init__(self, engine: RankEngine, num_steps: int, *, wait_seconds: float = 30.0) -> None:
        super().__init__()
        self._engine, self._num_steps, self._wait_seconds = engine, num_steps, wait_seconds
        self.profile: StepProfile | None = None

    def start(self) -> None:
        super().start()
        while self._engine._profiler._order is None:
            assert self.is_alive(), "the order was never given"

    def run(self) -> None:
        self.profile = self._engine.profile(self._num_steps, self._wait_seconds)


def test_a_profile_has_the_steps_and_their_operations_and_changes_no_answer() -> None:
    undisturbed = build_fake_rank("decode").engine
    expected = _decode_while(undisturbed, threading.Thread(target=lambda: None))
    engine = build_fake_rank("decode").engine
    take = _Take(engine, 7)
    assert _decode_while(engine, take) == expected
    profile = take.profile
    assert profile is not None
    assert profile.num_steps == 7
    assert profile.seconds > 0
    events = json.loads(gzip.decompress(profile.trace))["traceEvents"]
    steps = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    first = int(steps[0].removeprefix("step "))
    assert steps == [f"step {step}" for step in range(first, first + 7)]
    assert sum(event["name"] == "aten::index_select" or event["name"] == "aten::index" for event in events) >= 7


def test_a_rank_that_runs_out_of_work_gives_what_it_has() -> None:
    engine = build_fake_rank("decode").engine
    take = _Take(engine, 10_000)
    _decode_while(engine, take, max_tokens=9)
    assert take.profile is not None
    assert take.profile.num_steps in (8, 9)  # the last may be the one that was under way when the answer ended


def test_an_idle_rank_gives_nothing_and_profiles_later() -> None:
    engine = build_fake_rank("decode").engine
    assert engine.profile(3, 0.05) is None
    take = _Take(engine, 3)
    _decode_while(engine, take)
    assert take.profile is not None


def test_two_profiles_at_once_are_refused() -> None:
    engine = build_fake_rank("decode").engine
    take = _Take(engine, 3, wait_seconds=1.0)
    take.start()
    with pytest.raises(DeepInferError, match="another profile"):
        engine.profile(3, 0.0)
    take.join(30.0)
    assert take.profile is None


def test_a_profiler_that_fails_costs_only_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("no counters here")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    engine = build_fake_rank("decode").engine
    refusals: list[str] = []

    def take() -> None:
        try:
            engine.profile(3, 30.0)
        except DeepInferError as error:
            refusals.append(str(error))

    tokens = _decode_while(engine, threading.Thread(target=take))
    assert len(tokens) == 39
    assert refusals == ["torch's profiler failed: RuntimeError: no counters here"]
