"""Output lines: the two OpenAI objects, usage, log-probabilities, strict JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from deepinfer.batch_file.bodies import AnsweredRow, AnswerWriter, error_line
from deepinfer.batch_file.fields import CHAT, COMPLETIONS, Endpoint
from deepinfer.errors import RequestError
from deepinfer.outputs import CompletionOutput, RequestOutput, RowResult, ToolCall
from tests.doors.echo_engine import EchoTexts


def _strict(data: bytes) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(name)

    line: dict[str, Any] = json.loads(data.decode("utf-8"), parse_constant=refuse)
    return line


def _body(output: CompletionOutput, endpoint: Endpoint, num_logprobs: int | None = None) -> dict[str, Any]:
    result = RowResult(
        3,
        RequestOutput(
            "r3", prompt_token_ids=[1, 2], outputs=[output], num_cached_tokens=1, num_drafted_tokens=6,
            num_accepted_tokens=4, seed=9,
        ),
        seconds=0.25, prefill_rank=1, decode_rank=2,
    )  # fmt: skip
    row = AnsweredRow("a", endpoint, num_logprobs)
    line = _strict(AnswerWriter("job", "the-model", EchoTexts()).line(row, result, created=77))
    assert line["id"] == "batch_req_job_3"
    assert line["error"] is None
    assert line["response"]["request_id"] == "r3"
    body: dict[str, Any] = line["response"]["body"]
    return body


def test_a_chat_answer() -> None:
    output = CompletionOutput(
        0, text="yes", token_ids=[1, 2, 3], finish_reason="stop", reasoning="hm", num_reasoning_tokens=2
    )
    assert _body(output, CHAT) == {
        "id": "chatcmpl-job-3",
        "object": "chat.completion",
        "created": 77,
        "model": "the-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "completion_tokens_details": {"reasoning_tokens": 2},
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "deepinfer": {
            "num_drafted_tokens": 6,
            "num_accepted_tokens": 4,
            "prefill_rank": 1,
            "decode_rank": 2,
            "seconds": 0.25,
            "seed": 9,
        },
    }


def test_an_answer_that_is_only_thinking_has_empty_content() -> None:
    """P27: cut by length inside the reasoning: content is there and empty."""
    output = CompletionOutput(0, token_ids=[1], finish_reason="length", reasoning="hm", num_reasoning_tokens=1)
    message = _body(output, CHAT)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_tool_calls() -> None:
    output = CompletionOutput(0, finish_reason="tool_calls", tool_calls=[ToolCall("c1", "f", '{"a": 1}')])
    choice = _body(output, CHAT)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]


# Chosen first, then the most likely by descending value; the chosen one isn't repeated.
LOGPROBS = [{98: -0.5, 97: -0.25, 99: -math.inf}, {0xE9: -0.125, 98: -3.0}]


def test_chat_logprobs_are_the_most_likely_tokens() -> None:
    """P40: -inf has no JSON form and becomes -9999."""
    output = CompletionOutput(0, text="bé", token_ids=[98, 0xE9], logprobs=LOGPROBS, finish_reason="length")
    first, second = _body(output, CHAT, 3)["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("b", -0.5, [98])
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [
        ("a", -0.25),
        ("b", -0.5),
        ("c", -9999.0),
    ]
    assert second["bytes"] == [0xC3, 0xA9]
    none = _body(output, CHAT, 0)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[], []]
    assert len(_body(output, CHAT, -1)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3


def test_completion_logprobs() -> None:
    output = CompletionOutput(0, text="bé", token_ids=[98, 0xE9], logprobs=LOGPROBS, finish_reason="length")
    body = _body(output, COMPLETIONS, 2)
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "bé",
            "logprobs": {
                "tokens": ["b", "é"],
                "token_logprobs": [-0.5, -0.125],
                "top_logprobs": [{"b": -0.5, "a": -0.25, "c": -9999.0}, {"é": -0.125, "b": -3.0}],
                "text_offset": [0, 1],
            },
            "finish_reason": "length",
        }
    ]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_numbers_without_a_json_form_never_reach_the_output(endpoint: Endpoint, value: float) -> None:
    output = CompletionOutput(0, text="a", token_ids=[97], logprobs=[{97: value}], finish_reason="length")
    assert "-9999.0" in json.dumps(_body(output, endpoint, 1))


def test_text_without_a_utf8_form_is_replaced() -> None:
    output = CompletionOutput(0, text="a\ud800b\U0001f600", reasoning="\udfff", finish_reason="stop")
    message = _body(output, CHAT)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("a\ufffdb\U0001f600", "\ufffd")


def test_an_error_line() -> None:
    """P06, P09: a failed row has no response, so no reader takes it for an answer."""
    line = _strict(error_line("job", 4, None, RequestError("bad \ud800", code="invalid_value", param="n")))
    assert line == {
        "id": "batch_req_job_4",
        "custom_id": None,
        "response": None,
        "error": {"code": "invalid_value", "message": "bad \ufffd", "param": "n", "line": 4},
    }
