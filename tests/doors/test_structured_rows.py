"""From a row's fields to the grammar of its request, and what is refused on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.client import RequestMaker
from deepinfer.errors import RequestError
from deepinfer.models.deepseek_v41 import tiny_tokenizer
from deepinfer.outputs import ChatOptions, Row
from deepinfer.protocol import GrammarSpec, Request, SamplingParams
from deepinfer.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer.tokenizer_json(), tiny_tokenizer.tokenizer_config_json(4096))
MAKER = RequestMaker(TOKENIZER, vocab_size=TOKENIZER.vocab_size, max_model_len=4096, max_logprob_bytes=10_000)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SO_ARGS = {"schema_type": "json", "schema": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "now"}}


def _tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [_tool("weather", type="object", properties={"city": {"type": "string"}}, required=["city"]), _tool("now")]


def _request(params: dict[str, Any] | None = None, *, is_chat: bool = True, **chat: Any) -> Request:
    sampling, options = SamplingParams(**(params or {})), ChatOptions(**{"thinking": False, **chat})
    messages = [{"role": "user", "content": "hi"}]
    row = Row(0, None if is_chat else "hi", messages if is_chat else None, options, sampling)
    return MAKER.prepare(row, "r").request


@pytest.mark.parametrize("is_chat", [True, False])
def test_both_fields_mean_the_same_grammar(is_chat: bool) -> None:
    spec = GrammarSpec(kind="json", text=json.dumps(SCHEMA))
    assert _request({"so_args": SO_ARGS}, is_chat=is_chat).grammar == spec
    assert _request(is_chat=is_chat, response_format=FORMAT).grammar == spec
    assert _request(is_chat=is_chat).grammar is None
    assert _request({"so_args": SO_ARGS}).sampling.so_args is None


def test_only_response_format_is_told_to_the_model() -> None:
    plain = _request().prompt_token_ids
    assert _request({"so_args": SO_ARGS}).prompt_token_ids == plain
    assert len(_request(response_format=FORMAT).prompt_token_ids) > len(plain)


def test_thinking_comes_before_the_grammar() -> None:
    assert _request(response_format=FORMAT, thinking=True).output_format.in_reasoning


@pytest.mark.parametrize(("choice", "names"), [("required", ["weather", "now"]), (NAMED, ["now"])])
def test_a_forced_call_names_its_tools(choice: Any, names: list[str]) -> None:
    request = _request(tools=TOOLS, tool_choice=choice)
    assert request.grammar is not None
    assert request.grammar.kind == "tool_calls"
    assert [function["name"] for function in json.loads(request.grammar.text)] == names
    assert request.output_format.parse_tools
    assert request.prompt_token_ids == _request(tools=TOOLS).prompt_token_ids


@pytest.mark.parametrize(
    ("params", "chat", "param"),
    [
        ({"so_args": SO_ARGS}, {"response_format": FORMAT}, "so_args"),
        ({"so_args": SO_ARGS}, {"tools": TOOLS}, "so_args"),
        ({}, {"response_format": FORMAT, "tools": TOOLS, "tool_choice": "required"}, "response_format"),
        ({"so_args": SO_ARGS, "ignore_eos": True}, {}, "ignore_eos"),
        ({"so_args": SO_ARGS, "min_tokens": 2}, {}, "min_tokens"),
        ({"allowed_token_ids": (5,)}, {"response_format": FORMAT}, "allowed_token_ids"),
        ({"so_args": {"schema_type": "json", "schema": {"type": "objekt"}}}, {}, "so_args.schema"),
        ({}, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({}, {"tools": [_tool("f", properties={"a": {"not": {}}})], "tool_choice": "required"}, "tools"),
        ({}, {"tools": [_tool("f", properties={'a"b': {}})], "tool_choice": "required"}, "tools"),
        ({}, {"tools": [_tool("f", type="object", minProperties=0)], "tool_choice": "required"}, "tools"),
        (
            {},
            {
                "tools": [_tool("f", properties={"a": {"type": "string", "format": "uuid"}})],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_can_not_be_is_refused_by_its_field(params: dict[str, Any], chat: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        _request(params, **chat)
    assert caught.value.param == param


def test_a_tool_that_may_be_called_needs_no_schema_that_can_be_enforced() -> None:
    tools = [_tool("f", properties={"a": {"not": {}}})]
    assert _request(tools=tools).grammar is None
    assert _request({"so_args": SO_ARGS}, tools=tools, tool_choice="none").grammar is not None
