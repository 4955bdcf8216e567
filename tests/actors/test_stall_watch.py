"""Deadlines of hanging ranks, on a clock of the test."""

from __future__ import annotations

from deepinfer.actors.rank_life import RankProgress
from deepinfer.actors.stall_watch import StallWatch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_watch() -> tuple[StallWatch, Clock]:
    clock = Clock()
    return StallWatch(2, timeout_seconds=10.0, clock=clock), clock


def pass_time(watch: StallWatch, clock: Clock, answers: dict[int, RankProgress], *, seconds: float = 12.0) -> None:
    for _ in range(int(seconds)):
        clock.now += 1.0
        for rank, progress in answers.items():
            watch.seen(rank, progress)


def test_parked_ranks_may_stand_still_for_ever() -> None:
    watch, clock = make_watch()
    parked = RankProgress(step=7, parked=True)
    pass_time(watch, clock, {0: parked, 1: parked}, seconds=1000)
    assert watch.stalled() is None


def test_a_step_that_does_not_end_is_noticed() -> None:
    watch, clock = make_watch()
    pass_time(watch, clock, {0: RankProgress(step=7, parked=False), 1: RankProgress(step=7, parked=True)})
    rank, text = watch.stalled()
    assert rank == 0
    assert "step 7" in text
    assert "scheduler.step_timeout_seconds is 10" in text


def test_a_silent_rank_is_blamed_before_those_that_wait_for_it() -> None:
    watch, clock = make_watch()
    clock.now = 1.0
    watch.seen(1, RankProgress(step=3, parked=False))
    watch.seen(0, RankProgress(step=3, parked=False))
    clock.now = 2.0
    watch.seen(0, RankProgress(step=3, parked=False))
    pass_time(watch, clock, {0: RankProgress(step=3, parked=False)})
    rank, text = watch.stalled()
    assert rank == 1
    assert "has not answered" in text


def test_a_rank_that_moves_on_is_left_alone() -> None:
    watch, clock = make_watch()
    for step in range(100):
        clock.now += 5.0
        for rank in range(2):
            watch.seen(rank, RankProgress(step=step, parked=False))
        assert watch.stalled() is None
