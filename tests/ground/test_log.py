"""What a log line says of its process, step and request."""

from __future__ import annotations

import logging
import re

import pytest

from deepinfer.log import LineFormatter, about, get_logger, set_up_logging


def _line(name: str, text: str, *, process: str | None = None, **fields: object) -> str:
    record = get_logger(name).makeRecord(f"deepinfer.{name}", logging.WARNING, "f", 1, text, (), None, extra=fields)
    line = LineFormatter(process).format(record)
    assert re.match(r"\d\d:\d\d:\d\d W ", line)
    return line[len("00:00:00 W ") :]


def test_a_rank_is_named_on_every_line_of_its_process() -> None:
    assert _line("decode-3", "load code: begin", process="decode-3") == "decode-3] load code: begin"
    assert _line("kernels", "no DeepGEMM", process="decode-3") == "decode-3 kernels] no DeepGEMM"
    assert _line("start", "7 s") == "deepinfer.start] 7 s"


def test_step_and_request_stand_behind_the_message_in_one_order() -> None:
    line = _line("decode-3", "failed", process="decode-3", **about(row="story-1", request="3d08-17", step=120))
    assert line == "decode-3] failed | step=120 request=3d08-17 row=story-1"
    assert _line("driver", "failed", **about(step=0)) == "deepinfer.driver] failed | step=0"
    assert _line("driver", "failed", **about(row="")) == "deepinfer.driver] failed"


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("two words", '"two words"'),
        ("line\nbreak=1", '"line\\nbreak=1"'),
        ('a"b', '"a\\"b"'),
        ("é", '"\\u00e9"'),
        ("x" * 500, "x" * 197 + "..."),
    ],
)
def test_names_that_users_chose_stay_one_word_of_the_line(row: str, shown: str) -> None:
    assert _line("driver", "failed", **about(row=row)).partition("row=")[2] == shown


def test_a_trace_follows_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("deepinfer")
    before = (logger.level, logger.propagate, list(logger.handlers))
    set_up_logging("info", process="prefill-0")
    try:
        raise ValueError("on fire")
    except ValueError:
        get_logger("prefill-0").exception("broken", extra=about(step=7))
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.handlers[:] = before[2]
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("E prefill-0] broken | step=7")
    assert rest[-1] == "ValueError: on fire"
