"""Input rows: which fields there are, their types, and what they become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.batch_file.fields import CHAT, COMPLETIONS, body_field
from deepinfer.batch_file.lines import InputLine
from deepinfer.batch_file.rows import BatchRow, build_row, decode_line
from deepinfer.errors import RequestError
from deepinfer.outputs import ChatOptions
from deepinfer.protocol import SamplingParams
from deepinfer.scheduler.sampling_params import check_sampling

MESSAGES = [{"role": "user", "content": "hi"}]


def _build(body: dict[str, Any], url: str = COMPLETIONS) -> BatchRow:
    text = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}).encode()
    return build_row(decode_line(InputLine(1, text, bytes(16))), 1)


def _refusal(body: dict[str, Any], url: str = COMPLETIONS) -> RequestError:
    with pytest.raises(RequestError) as caught:
        _build(body, url)
    return caught.value


def test_every_completion_field_reaches_its_parameter() -> None:
    body = {
        "model": "m", "user": "u", "prompt": "x", "max_tokens": 3, "temperature": 0, "top_p": 0.5, "n": 2, "stop": "s",
        "seed": 5, "logprobs": 4, "presence_penalty": 1, "frequency_penalty": -1.5, "logit_bias": {"7": -100},
        "response_format": {"type": "text"}, "top_k": 9, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 1,
        "stop_token_ids": [3, 4], "ignore_eos": True, "stream": False,
    }  # fmt: skip
    built = _build(body)
    assert built.row.prompt == "x"
    assert built.row.messages is None
    assert built.row.params == SamplingParams(
        max_tokens=3, temperature=0, top_p=0.5, n=2, stop=("s",), seq_seed=5, logprobs=4, presence_penalty=1,
        frequency_penalty=-1.5, logit_bias={7: -100.0}, top_k=9, min_p=0.25, repetition_penalty=1.5, min_tokens=1,
        stop_token_ids=(3, 4), ignore_eos=True,
    )  # fmt: skip


def test_every_chat_field_reaches_its_place() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "messages": MESSAGES, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 5, "tools": tools,
        "tool_choice": "auto", "reasoning_effort": "low", "thinking": False, "stop": ["a", "b"],
    }  # fmt: skip
    built = _build(body, CHAT)
    assert built.row.messages == MESSAGES
    assert built.row.prompt is None
    assert built.row.chat == ChatOptions(thinking=False, reasoning_effort="low", tools=tools, tool_choice="auto")
    assert built.row.params == SamplingParams(max_tokens=3, logprobs=5, stop=("a", "b"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 65_536),
        ({"thinking": False}, 8_192),
        ({"reasoning_effort": "none"}, 8_192),
        ({"reasoning_effort": "max"}, 131_072),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
        ({"max_tokens": None, "temperature": None}, 65_536),
    ],
)
def test_default_number_of_tokens_of_a_chat(fields: dict[str, Any], expected: int) -> None:
    assert _build({"messages": MESSAGES} | fields, CHAT).row.params.max_tokens == expected


def test_defaults_of_a_completion() -> None:
    assert _build({"prompt": [0, 5]}).row.params == SamplingParams(max_tokens=16)
    assert _build({"prompt": [0, 5]}).row.prompt == [0, 5]


@pytest.mark.parametrize(
    ("body", "url", "param", "words"),
    [
        ({"prompt": "x", "temprature": 1}, COMPLETIONS, "temprature", "did you mean temperature"),
        ({"prompt": "x", "tools": []}, COMPLETIONS, "tools", "belongs to /v1/chat/completions"),
        ({"messages": MESSAGES, "prompt": "x"}, CHAT, "prompt", "belongs to /v1/completions"),
        ({"prompt": "x", "temperature": "1"}, COMPLETIONS, "temperature", "must be a number, not '1'"),
        ({"prompt": "x", "temperature": True}, COMPLETIONS, "temperature", "must be a number, not True"),
        ({"prompt": "x", "n": 1.5}, COMPLETIONS, "n", "must be an integer"),
        ({"prompt": "x", "n": True}, COMPLETIONS, "n", "must be an integer"),
        ({"prompt": "x", "stop": [1]}, COMPLETIONS, "stop", "list of strings"),
        ({"prompt": "x", "stop_token_ids": "1"}, COMPLETIONS, "stop_token_ids", "list of integers"),
        ({"prompt": "x", "ignore_eos": 1}, COMPLETIONS, "ignore_eos", "true or false"),
        ({"prompt": "x", "logprobs": True}, COMPLETIONS, "logprobs", "must be an integer"),
        ({"prompt": "x", "top_logprobs": 1}, COMPLETIONS, "top_logprobs", "belongs to /v1/chat"),
        ({"messages": MESSAGES, "logprobs": 3}, CHAT, "logprobs", "true or false"),
        ({"messages": MESSAGES, "top_logprobs": 3}, CHAT, "top_logprobs", "needs logprobs"),
        ({"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, CHAT, "max_tokens", "give one"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, COMPLETIONS, "logit_bias", "token ids as keys"),
        ({"prompt": "x", "logit_bias": {"1": "a"}}, COMPLETIONS, "logit_bias", "numbers as values"),
        ({"prompt": "x", "stream": True}, COMPLETIONS, "stream", "false or left out"),
        ({"prompt": []}, COMPLETIONS, "prompt", "at least one"),
        ({"prompt": ["a", "b"]}, COMPLETIONS, "prompt", "a list of 2"),
        ({"prompt": [[1]]}, COMPLETIONS, "prompt", "one prompt"),
        ({"prompt": [1, "a"]}, COMPLETIONS, "prompt", "item 1 is 'a'"),
        ({"prompt": [1, True]}, COMPLETIONS, "prompt", "item 1 is True"),
        ({"prompt": [-1]}, COMPLETIONS, "prompt", "item 0 is -1"),
        ({"prompt": 5}, COMPLETIONS, "prompt", "not 5"),
        ({"prompt": None}, COMPLETIONS, "prompt", "not None"),
        ({}, CHAT, "messages", "is missing"),
        ({"messages": "hi"}, CHAT, "messages", "must be a list"),
        ({"messages": MESSAGES, "thinking": {"type": "enabled"}}, CHAT, "thinking", "true or false"),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], url: str, param: str, words: str) -> None:
    error = _refusal(body, url)
    assert error.param == param
    assert words in str(error)
    assert param in str(error)


def test_a_number_beyond_every_float_stays_the_error_of_its_row() -> None:
    params = _build({"prompt": "x", "logit_bias": {"5": 10**400}}).row.params
    with pytest.raises(RequestError, match="use a number from -100 to 100"):
        check_sampling(params, vocab_size=16, max_logprobs=None)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_structured_output_is_passed_on_by_both_endpoints(url: str) -> None:
    so_args, response_format = {"schema_type": "regex", "schema": "a"}, {"type": "json_object"}
    body = {"messages": MESSAGES} if url == CHAT else {"prompt": "x"}
    row = _build({**body, "so_args": so_args, "response_format": response_format}, url).row
    assert row.params.so_args == so_args
    assert row.chat.response_format == response_format


def test_parameter_names_are_given_back_in_the_words_of_the_body() -> None:
    assert body_field("seq_seed", (), COMPLETIONS) == "seed"
    assert body_field("logprobs", ("logprobs",), COMPLETIONS) == "logprobs"
    assert body_field("logprobs", ("logprobs",), CHAT) == "top_logprobs"
    assert body_field("max_tokens", ("max_completion_tokens",), CHAT) == "max_completion_tokens"
    assert body_field("top_p", (), CHAT) == "top_p"
