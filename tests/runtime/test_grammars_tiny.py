"""Grammars with the tiny model: every answer conforms, with thinking or without, drafts or not."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from support.random_schemas import random_schema
from support.rank_engines import Answer, answer_all, make_request
from support.tiny_ranks import build_tiny_rank

from deepinfer.codec import unpack_floats
from deepinfer.protocol import FinishCode, GrammarSpec, OutputFormat, Request
from deepinfer.schema_check import grammar_of_so_args, grammar_of_tools
from deepinfer.tokenizer import OutputParser, Tokenizer, parse_tools

SETTINGS = (
    "model.max_model_len=1024",
    "prefill.max_running=100",
    "decode.max_running=100",
    "speculative.max_draft_tokens=0",
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "n": {"type": "integer", "maximum": 99}},
    "required": ["city", "n"],
}


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def _spec(schema: Any) -> GrammarSpec:
    return grammar_of_so_args({"schema_type": "json", "schema": schema})


def _request(index: int, grammar: GrammarSpec, *, thinking: bool = False, **sampling: Any) -> Request:
    options = {"max_tokens": 900, "temperature": 1.0, "ignore_eos": False} | sampling
    request = make_request(index, [3 + index % 200, 7, 11], **options)
    output_format = OutputFormat(kind="chat", in_reasoning=thinking)
    return msgspec.structs.replace(request, grammar=grammar, output_format=output_format)


def _answers(directory: Path, requests: list[Request], *settings: str) -> dict[int, Answer]:
    ranks = [build_tiny_rank(role, directory, *SETTINGS, *settings) for role in ("prefill", "decode")]
    answers = answer_all(ranks[0], ranks[1], requests)
    assert [answer.failure for answer in answers.values() if answer.failure] == []
    return answers


def _text(tokenizer: Tokenizer, answer: Answer) -> str:
    assert answer.finish is FinishCode.STOP
    assert answer.token_ids[-1] == tokenizer.eos_token_id
    return b"".join(map(tokenizer.token_bytes, answer.token_ids[:-1])).decode()  # UTF-8 too


_THOUSAND = [pytest.mark.slow, pytest.mark.timeout(3600)]  # 3 to 25 minutes each, by what else runs


@pytest.mark.parametrize(
    ("count", "depth", "drafts"),
    [
        (100, 1, "max_draft_tokens=0"),
        pytest.param(1000, 3, "max_draft_tokens=0", marks=_THOUSAND),
        pytest.param(1000, 3, "max_draft_tokens=3", marks=_THOUSAND),
        pytest.param(1000, 3, "max_draft_tokens=5", marks=_THOUSAND),
        pytest.param(1000, 3, "max_draft_tokens=5 varlen=true", marks=_THOUSAND),
    ],
)
def test_every_answer_satisfies_its_schema(
    directory: Path, tokenizer: Tokenizer, tmp_path: Path, count: int, depth: int, drafts: str
) -> None:
    numbers = random.Random(count)
    schemas = [random_schema(numbers, depth) for _ in range(count)]
    settings = [f"cache_dir={tmp_path}", *(f"speculative.{setting}" for setting in drafts.split())]
    answers = _answers(directory, [_request(index, _spec(schema)) for index, schema in enumerate(schemas)], *settings)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for index, schema in enumerate(schemas):
        text = _text(tokenizer, answers[index])
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def _thinking_bias(tokenizer: Tokenizer) -> dict[int, float]:
    """The end of the reasoning comes soon, an end of sequence in it would come sooner; white space fills no answer."""
    close = tokenizer.control_id("</think>")
    assert close is not None
    return {tokenizer.encode_text(space)[0]: -100.0 for space in " \t\n\r"} | {
        close: 9.0,
        tokenizer.eos_token_id: 12.0,
    }


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_the_grammar_begins_where_the_thinking_ends(directory: Path, tokenizer: Tokenizer, num_drafts: int) -> None:
    """P20, P21: content is the JSON object, reasoning is free text that came before."""
    bias = _thinking_bias(tokenizer)
    requests = [_request(index, _spec(CITY), thinking=True, logit_bias=bias) for index in range(10)]
    answers = _answers(directory, requests, f"speculative.max_draft_tokens={num_drafts}")
    num_thoughts = []
    for request in requests:
        token_ids = answers[request.index].token_ids
        parser = OutputParser(tokenizer, request.output_format)
        for token_id in token_ids[:-1]:
            parser.push(token_id)
        parsed = parser.finish("stop")
        jsonschema.validate(json.loads(parsed.content), CITY)
        assert '{"city"' not in parsed.reasoning
        assert token_ids.index(tokenizer.eos_token_id) == len(token_ids) - 1
        num_thoughts.append(parsed.num_reasoning_tokens)
    assert len(set(num_thoughts)) > 3


def test_thinking_that_never_ends_ends_at_the_limit(directory: Path, tokenizer: Tokenizer) -> None:
    """P27."""
    close = tokenizer.control_id("</think>")
    assert close is not None
    request = _request(0, _spec(CITY), thinking=True, max_tokens=30, logit_bias={close: -100.0})
    answer = _answers(directory, [request])[0]
    assert (answer.finish, len(answer.token_ids)) == (FinishCode.LENGTH, 30)


def test_newlines_can_not_go_on_for_ever(directory: Path, tokenizer: Tokenizer) -> None:
    """P25."""
    newline = tokenizer.encode_text("\n")[0]
    request = _request(0, _spec(CITY), temperature=0.0, logit_bias={newline: 100.0})
    text = _text(tokenizer, _answers(directory, [request])[0])
    assert re.search(r"\n{8}", text)
    jsonschema.validate(json.loads(text), CITY)


def test_log_probabilities_are_those_of_the_model(directory: Path) -> None:
    """P40: they tell what the model thinks of all tokens, so a grammar makes none of them infinite."""
    spec = grammar_of_so_args({"schema_type": "regex", "schema": "(?:a|b){6}"})
    answer = _answers(directory, [_request(0, spec, logprobs=20)])[0]
    assert len(answer.token_ids) == 7
    values = [value for columns in answer.logprobs for value in unpack_floats(columns.values).tolist()]
    assert len(values) == 6 * 21  # the first token's came from the prefill rank
    assert all(math.isfinite(value) and value <= 0 for value in values)


@pytest.mark.parametrize("thinking", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_forced_call_is_read_back_with_its_arguments(directory: Path, tokenizer: Tokenizer, thinking: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "F"]},
            "city": {"type": "string", "minLength": 1, "maxLength": 3},
            "days": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 9},
                "minItems": 1,
                "maxItems": 2,
            },
        },
        "required": ["city", "days"],
    }
    tools = parse_tools([{"function": {"name": "weather", "parameters": parameters}}])
    requests = [
        _request(index, grammar_of_tools(tools), thinking=thinking, logit_bias=_thinking_bias(tokenizer))
        for index in range(6)
    ]
    answers = _answers(directory, requests)
    for request in requests:
        output_format = OutputFormat(kind="chat", in_reasoning=thinking, parse_tools=True)
        parser = OutputParser(tokenizer, output_format, tools=tools)
        for token_id in answers[request.index].token_ids[:-1]:
            parser.push(token_id)
        parsed = parser.finish("stop")
        assert (parsed.content, parsed.finish_reason) == ("", "tool_calls")
        (call,) = parsed.tool_calls
        assert call.name == "weather"
        jsonschema.validate(json.loads(call.arguments), parameters)
