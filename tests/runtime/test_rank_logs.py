"""A rank's lines about a request name it, and the step in which it happened."""

from __future__ import annotations

from support.fake_model import FakeModel
from support.log_lines import LogLines
from support.rank_engines import answer_all, build_fake_rank, make_request


def test_a_request_that_fails_on_a_rank_is_named_with_its_step() -> None:
    request = make_request(0, [3, 4, 5], max_tokens=30)
    prefill = build_fake_rank("prefill")
    with LogLines("decode-0") as log:
        answers = answer_all(prefill.engine, build_fake_rank("decode").engine, [request])
        [tokens] = [answer.token_ids for answer in answers.values()]
        assert log.lines == []
        poisoned = build_fake_rank("decode", model=FakeModel(nan_token=tokens[5]))
        answer = answer_all(build_fake_rank("prefill").engine, poisoned.engine, [request])[0]
    assert answer.failure is not None
    [line] = log.lines
    text, _, fields = line.partition(" | ")
    assert " W decode-0] numerical_error: " in text
    step, name = fields.split()
    assert name == "request=request-0"
    assert int(step.removeprefix("step=")) > 0
