"""From `so_args` and `response_format` to a specification."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.errors import RequestError
from deepinfer.schema_check import grammar_of_response_format, grammar_of_so_args, normalize_regex

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("name", ["json", "json_schema"])
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_schema_may_be_an_object_or_its_text(name: str, schema: Any) -> None:
    spec = grammar_of_so_args({"schema_type": name, "schema": schema})
    assert (spec.kind, json.loads(spec.text)) == ("json", SCHEMA)


@pytest.mark.parametrize("empty", [{}, "", None, "{}", "  "])
def test_no_schema_means_any_object(empty: Any) -> None:
    spec = grammar_of_so_args({"schema_type": "json", "schema": empty})
    assert json.loads(spec.text)["type"] == "object"


def test_both_names_of_a_grammar() -> None:
    specs = {grammar_of_so_args({"schema_type": name, "schema": 'root ::= "a"'}) for name in ("ebnf", "grammar")}
    assert len(specs) == 1


@pytest.mark.parametrize(
    ("so_args", "param"),
    [
        ("json", "so_args"),
        ({"schema_type": "xml", "schema": ""}, "so_args.schema_type"),
        ({"schema": SCHEMA}, "so_args.schema_type"),
        ({"schema_type": "json", "schema": SCHEMA, "strict": True}, "so_args.strict"),
        ({"schema_type": "json", "schema": "[]"}, "so_args.schema"),
        ({"schema_type": "json", "schema": "{"}, "so_args.schema"),
        ({"schema_type": "json", "schema": 3}, "so_args.schema"),
        ({"schema_type": "regex", "schema": ""}, "so_args.schema"),
        ({"schema_type": "regex", "schema": "("}, "so_args.schema"),
        ({"schema_type": "regex", "schema": "\ud800"}, "so_args.schema"),
        ({"schema_type": "ebnf", "schema": "x" * 100_000}, "so_args.schema"),
    ],
)
def test_wrong_fields_are_named(so_args: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of_so_args(so_args)
    assert caught.value.param == param


def test_response_formats() -> None:
    assert grammar_of_response_format(None) is None
    assert grammar_of_response_format({"type": "text"}) is None
    any_object = grammar_of_response_format({"type": "json_object"})
    assert any_object == grammar_of_so_args({"schema_type": "json"})
    spec = grammar_of_response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert spec is not None
    assert json.loads(spec.text) == SCHEMA
    with pytest.raises(RequestError, match="at #/required"):
        grammar_of_response_format({"type": "json_schema", "json_schema": {"schema": {"required": ["a"]}}})


@pytest.mark.parametrize(
    "text",
    [
        r"\bfoo", "(?i)a", "(?P<x>a)", r"(a)\1", "a^b", "(^a$)|b", "a$b", "[a&&b]", "[[:alpha:]]",
        "[]a]", "[^]", r"\p{L}", r"\Aa", "a{3,2}", "a*+", "(?=a)", "(", "[z-a]", "*", "x" * 10_000,
    ],
)  # fmt: skip
def test_regular_expressions_that_mean_something_else_to_the_engine_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        normalize_regex(text, param="so_args.schema")


@pytest.mark.parametrize(
    "text", [r"^a$", r"^\$$", r"a\\", r"^(?:a|b){2,3}[^\]x-z]\.$", r"[\s\S]*?", r"[\w.-]+@[\w-]+", r"[^\D]", ""]
)
def test_ordinary_regular_expressions_pass(text: str) -> None:
    normalize_regex(text, param="so_args.schema")


def test_only_real_anchors_are_dropped() -> None:
    assert normalize_regex(r"^a\$", param="x") == r"a\$"
    assert normalize_regex(r"^a\\$", param="x") == r"a\\"
