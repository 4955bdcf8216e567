"""A rank's lines about a request name it, and the step in which it happened."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from support.fake_model import FakeModel
from support.rank_engines import answer_all, build_fake_rank, make_request

from deepinfer.log import LineFormatter, get_logger


class _Lines(logging.Handler):
    def __init__(self, process: str) -> None:
        super().__init__()
        self.setFormatter(LineFormatter(process))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = _Lines("decode-0")
    get_logger("decode-0").addHandler(handler)
    yield handler.lines
    get_logger("decode-0").removeHandler(handler)


def test_a_request_that_fails_on_a_rank_is_named_with_its_step(lines: list[str]) -> None:
    request = make_request(0, [3, 4, 5], max_tokens=30)
    prefill = build_fake_rank("prefill")
    [tokens] = [a.token_ids for a in answer_all(prefill.engine, build_fake_rank("decode").engine, [request]).values()]
    assert lines == []
    poisoned = build_fake_rank("decode", model=FakeModel(nan_token=tokens[5]))
    answer = answer_all(build_fake_rank("prefill").engine, poisoned.engine, [request])[0]
    assert answer.failure is not None
    [line] = lines
    text, _, fields = line.partition(" | ")
    assert " W decode-0] numerical_error: " in text
    step, name = fields.split()
    assert name == "request=request-0"
    assert int(step.removeprefix("step=")) > 0
