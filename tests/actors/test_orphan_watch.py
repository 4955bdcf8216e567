"""When a rank counts as having no driver, on a clock of the test."""

from __future__ import annotations

import threading

from deepinfer.actors.orphan_watch import OrphanWatch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_silence_makes_an_orphan() -> None:
    clock = Clock()
    watch = OrphanWatch(10.0, clock=clock)
    for _ in range(5):
        clock.now += 9.0
        assert not watch.is_orphan()
        watch.heard()
    clock.now += 11.0
    assert watch.is_orphan()


def test_the_end_comes_once() -> None:
    ended = threading.Semaphore(0)
    OrphanWatch(0.05).start(ended.release)
    assert ended.acquire(timeout=20)
    assert not ended.acquire(timeout=0.2)
