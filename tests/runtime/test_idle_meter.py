"""The share of idle device time."""

from __future__ import annotations

from deepinfer.runtime.idle_meter import IdleMeter


def test_gaps_between_pieces_of_one_stretch_count() -> None:
    meter = IdleMeter()
    assert meter.share == 0.0
    meter.record(10.0, 12.0)
    meter.record(13.0, 16.0)
    assert meter.share == 1.0 / 6.0


def test_time_without_work_does_not_count() -> None:
    meter = IdleMeter()
    meter.record(10.0, 12.0)
    meter.pause()
    meter.record(100.0, 102.0)
    assert meter.share == 0.0


def test_only_the_latest_pieces_count() -> None:
    meter = IdleMeter(window=2)
    for begin, end in ((0.0, 1.0), (3.0, 4.0), (4.0, 5.0), (5.0, 6.0)):
        meter.record(begin, end)
    assert meter.share == 0.0
