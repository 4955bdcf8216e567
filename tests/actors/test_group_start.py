"""What is said of a start that fails: the same, whichever group fails first."""

from __future__ import annotations

import asyncio

import pytest

from deepinfer.actors.group_start import start_together
from deepinfer.errors import CheckpointError, ClusterError, ConfigError, RankError


async def fail(error: Exception, seconds: float) -> list:
    await asyncio.sleep(seconds)
    raise error


async def succeed(seconds: float, log: list[str]) -> list:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        log.append("cancelled")
        raise
    return ["facts"]


@pytest.mark.parametrize("seconds", [(0.0, 0.05), (0.05, 0.0), (0.0, 0.0)])
def test_two_failures_are_told_in_the_order_of_roles(seconds: tuple[float, float]) -> None:
    errors = ConfigError("no place", path="prefill.ranks"), ClusterError("no place for the decode ranks")
    starts = [fail(error, delay) for error, delay in zip(errors, seconds, strict=True)]
    with pytest.raises(ConfigError) as caught:
        asyncio.run(start_together(starts))
    assert str(caught.value) == "prefill.ranks: no place; no place for the decode ranks"


def test_one_failure_ends_the_other_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.actors.group_start._SECOND_FAILURE_SECONDS", 0.05)
    log: list[str] = []
    with pytest.raises(RankError, match="decode rank 3: broke"):
        asyncio.run(start_together([succeed(60.0, log), fail(RankError("broke", role="decode", rank=3), 0.0)]))
    assert log == ["cancelled"]


def test_the_same_failure_of_both_is_said_once() -> None:
    starts = [fail(CheckpointError("tensor x is missing"), 0.0) for _ in range(2)]
    with pytest.raises(CheckpointError) as caught:
        asyncio.run(start_together(starts))
    assert str(caught.value) == "tensor x is missing"


def test_an_interrupted_start_is_interrupted_everywhere() -> None:
    log: list[str] = []

    async def run() -> None:
        starting = asyncio.ensure_future(start_together([succeed(60.0, log), succeed(60.0, log)]))
        await asyncio.sleep(0.05)
        starting.cancel()
        await starting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert log == ["cancelled"] * 2


def test_results_come_in_order() -> None:
    assert asyncio.run(start_together([succeed(0.05, []), succeed(0.0, [])])) == [["facts"], ["facts"]]
