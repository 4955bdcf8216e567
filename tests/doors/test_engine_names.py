"""Ranks by the names that users type, and limits of an engine that a job hears of."""

from __future__ import annotations

import logging

import pytest

from deepinfer.config import load_config
from deepinfer.errors import ConfigError
from deepinfer.launcher.profiles import choose_ranks
from deepinfer.llm import _max_in_flight
from deepinfer.log import get_logger

RANKS = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-11"]


@pytest.mark.parametrize(
    ("which", "chosen"), [("decode-1", ["decode-1"]), ("1", ["prefill-1", "decode-1"]), ("11", ["decode-11"])]
)
def test_a_rank_is_meant_by_its_name_or_its_number(which: str, chosen: list[str]) -> None:
    assert choose_ranks(RANKS, which) == chosen


@pytest.mark.parametrize("which", ["driver", "decode", "2", ""])
def test_a_name_that_is_none_is_refused_with_the_right_ones(which: str) -> None:
    with pytest.raises(ConfigError, match=rf"--rank: '{which}' is no rank .* are prefill-0, .*, decode-11"):
        choose_ranks(RANKS, which)


def test_a_job_that_gets_fewer_requests_in_flight_is_told() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_logger("start")
    before = logger.level
    logger.setLevel("INFO")
    logger.addHandler(handler)
    few, many = (load_config(settings=[f"scheduler.max_in_flight={n}"], environ={}).config for n in (8, 100))
    try:
        assert _max_in_flight(few, many) == 8
        assert lines == []
        assert _max_in_flight(many, few) == 8
        assert lines == ["8 requests in flight (scheduler.max_in_flight): the engine allows no more"]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
