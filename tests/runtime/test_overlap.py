"""Host time is hidden behind device time: the engine's loop on a device whose steps take a fixed (virtual) time."""

from __future__ import annotations

import pytest
from support.rank_engines import answer_all, build_fake_rank, make_request
from support.virtual_stream import VirtualClock, VirtualModel, VirtualStream

NUM_STEPS = 20


def _run(*, asynchronous: bool, host_seconds: float) -> tuple[float, float, list[int]]:
    """Decode one sequence, 10 ms of device and `host_seconds` of host time a step: seconds, idle share, tokens."""
    clock = VirtualClock()
    decode = build_fake_rank(
        "decode", model=VirtualModel(clock, 0.010), stream=VirtualStream(clock), asynchronous=asynchronous
    )

    def spend_host_time(event: str, step_id: int) -> None:
        clock.now += host_seconds if event == "read" else 0.0

    decode.observers.append(spend_host_time)
    begin = clock.now
    answers = answer_all(
        build_fake_rank("prefill").engine, decode.engine, [make_request(0, [1, 2, 3], max_tokens=NUM_STEPS + 1)]
    )
    return clock.now - begin, decode.recorder.get("deepinfer_device_idle_share"), answers[0].token_ids


def test_a_synchronous_loop_keeps_the_device_waiting() -> None:
    seconds, idle_share, _ = _run(asynchronous=False, host_seconds=0.003)
    assert seconds == pytest.approx(NUM_STEPS * 0.013)
    assert idle_share == pytest.approx((NUM_STEPS - 1) * 0.003 / (NUM_STEPS * 0.010 + (NUM_STEPS - 1) * 0.003))


@pytest.mark.parametrize("host_seconds", [0.003, 0.0099])
def test_host_time_below_device_time_costs_nothing(host_seconds: float) -> None:
    seconds, idle_share, token_ids = _run(asynchronous=True, host_seconds=host_seconds)
    assert idle_share == pytest.approx(0.0, abs=1e-9)
    assert seconds == pytest.approx(
        NUM_STEPS * 0.010 + host_seconds
    )  # only the last results are read with nothing behind
    assert token_ids == _run(asynchronous=False, host_seconds=host_seconds)[2]


def test_host_time_above_device_time_sets_the_pace_and_shows() -> None:
    _, idle_share, _ = _run(asynchronous=True, host_seconds=0.015)
    assert idle_share == pytest.approx(1 / 3, abs=0.05)
