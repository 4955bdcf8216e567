"""Work beside a recording stream: the same results, on memory that nobody else was given meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepinfer.platforms.platform import load_platform
from deepinfer.platforms.side_stream import SideStream

SIZE, ROUNDS = 1 << 22, 8


def test_on_a_cpu_work_runs_when_it_starts() -> None:
    order: list[str] = []
    work = SideStream(torch.device("cpu")).start(lambda: order.append("side"))
    order.append("main")
    assert work.wait() is None
    assert order == ["side", "main"]


@pytest.mark.parametrize("starts", [True, False])
def test_held_work_runs_once_when_it_is_started_or_waited_for(starts: bool) -> None:
    order: list[str] = []
    work = SideStream(torch.device("cpu")).hold(lambda: order.append("side"))
    work.ready()
    order.append("first")
    if starts:
        work.start()
    order.append("second")
    for _ in range(2):
        work.wait()
    assert order == (["first", "side", "second"] if starts else ["first", "second", "side"])


def _step(data: torch.Tensor, side: SideStream) -> torch.Tensor:
    """Each round starts work on a value that the stream itself drops at once, and allocates as much again."""
    total = data
    for number in range(ROUNDS):
        value = total + number
        work = side.start(lambda value=value: (value * 2).sin().cos().mul_(value))
        del value
        total = torch.full_like(total, float("nan")).fill_(number) + work.wait()
    return total


def _held_step(data: torch.Tensor, side: SideStream) -> torch.Tensor:
    """Each round launches other work between the moment that its held work could begin and the start of that."""
    total = data
    for number in range(ROUNDS):
        value = total + number
        work = side.hold(lambda value=value: (value * 2).sin().cos().mul_(value))
        del value
        work.ready()
        other = torch.full_like(total, float("nan")).fill_(number).sqrt()
        work.start()
        total = other + work.wait()
    return total


@pytest.mark.gpu
@pytest.mark.parametrize("step", [_step, _held_step])
def test_a_graph_with_work_beside_gives_the_same_bits(step: Callable[[torch.Tensor, SideStream], torch.Tensor]) -> None:
    platform = load_platform("nvidia")
    stream, side = platform.open_stream("test"), SideStream(platform.device)
    data = torch.rand(SIZE, device=platform.device)
    replay = stream.submit(lambda: platform.capture(lambda: step(data, side))).result()
    for _ in range(3):
        found = stream.submit(lambda: replay().clone()).result()
        data.mul_(0.5)
        stream.submit(torch.cuda.synchronize).result()
        wanted = step(data.mul(2), side)
        assert torch.equal(found, wanted)
    stream.close()
