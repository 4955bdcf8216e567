"""What is refused of a schema, by name and JSON pointer; that the rest is enforced: `tests/structured_outputs`."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.errors import RequestError
from deepinfer.schema_check import normalize_schema

INTEGER = {"type": "integer"}
AB = {"a": {"type": "integer"}, "b": {"type": "string"}}

REFUSED = [
    ({"type": "objekt"}, "#/type", "objekt"),
    ({"type": []}, "#/type", "different types"),
    ({"minLength": 2}, "#/minLength", "beside 'type'"),
    ({"type": "object", "properties": {"a/b": {"type": "strin"}}}, "#/properties/a~1b/type", "strin"),
    ({"type": "string", "pattern": "^a$", "maxLength": 3}, "#/maxLength", "'pattern'"),
    ({"type": "string", "format": "date", "minLength": 3}, "#/minLength", "'format'"),
    ({"type": "string", "format": "hostname"}, "#/format", "hostname"),
    ({"type": "string", "pattern": "(?=a)b"}, "#/pattern", "group"),
    ({"type": "string", "pattern": '^a"$'}, "#/pattern", "quotes"),
    ({"type": "string", "pattern": r"^[a\\]$"}, "#/pattern", "backslashes"),
    ({"type": "string", "pattern": r"^a\n$"}, "#/pattern", "control"),
    ({"type": "string", "minLength": 5, "maxLength": 4}, "#/minLength", "maxLength"),
    ({"type": "string", "minLength": 1.5}, "#/minLength", "1.5"),
    ({"type": "integer", "minimum": 1.5}, "#/minimum", "1.5"),
    ({"type": "integer", "minimum": 2**60}, "#/minimum", "2^53"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "#/minimum", "no number"),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": 0}, "#/exclusiveMinimum", "minimum"),
    ({"type": "number", "multipleOf": 0.5}, "#/multipleOf", "integer"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "#/uniqueItems", "uniqueItems"),
    ({"type": "array", "contains": INTEGER}, "#/contains", "contains"),
    ({"type": "array", "items": [INTEGER]}, "#/items", "list"),
    ({"type": "array", "minItems": 2}, "#/minItems", "items"),
    ({"type": "object", "required": ["a"]}, "#/required", "properties"),
    ({"type": "object", "properties": AB, "additionalProperties": True}, "#/additionalProperties", "properties"),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "#/minProperties", "declared"),
    ({"type": "object", "patternProperties": {"^x": INTEGER}}, "#/patternProperties", "patternProperties"),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, "#/propertyNames", "propertyNames"),
    ({"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}}, "#/dependentRequired", "dependent"),
    ({"not": INTEGER}, "#/not", "'not'"),
    ({"if": INTEGER, "then": {"minimum": 2}}, "#/if", "'if'"),
    ({"allOf": [INTEGER, {"type": "number"}]}, "#/allOf", "merge"),
    ({"anyOf": [INTEGER], "type": "integer"}, "#/type", "'anyOf'"),
    ({"anyOf": []}, "#/anyOf", "at least one"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "#/oneOf", "anyOf"),
    ({"$ref": "#/$defs/none"}, "#/$ref", "$defs/none"),
    ({"$ref": "https://example.com/schema"}, "#/$ref", "example.com"),
    ({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}, "minimum": 3}, "#/minimum", "'$ref'"),
    ({"enum": []}, "#/enum", "at least one"),
    ({"type": "string", "enum": ["x", 1]}, "#/enum", "1"),
    ({"enum": ["x", "yyy"], "maxLength": 2}, "#/maxLength", "'enum'"),
    ({"type": "string", "nullable": True}, "#/nullable", "nullable"),
    ({"type": "object", "properties": {"a": False}}, "#/properties/a", "false"),
    ({"$ref": "#"}, "#", "recursion"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#", "recursion"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#", "recursion"),
    ({"anyOf": [{"$ref": "#"}]}, "#", "recursion"),
    ([INTEGER], "#", "list"),
    ("integer", "#", "str"),
    (True, "#", "bool"),
]


@pytest.mark.parametrize(("schema", "pointer", "word"), REFUSED)
def test_refusals_name_the_pointer_and_the_cause(schema: Any, pointer: str, word: str) -> None:
    """P23."""
    with pytest.raises(RequestError) as caught:
        normalize_schema(schema, param="response_format")
    assert caught.value.code == "unsupported_schema"
    assert caught.value.param == "response_format"
    assert f"at {pointer}: " in str(caught.value)
    assert word in str(caught.value)


def test_deep_and_large_schemas_are_refused_without_recursion() -> None:
    deep: dict[str, Any] = INTEGER
    for _ in range(100_000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="nested"):
        normalize_schema(deep, param="schema")
    large = {"type": "object", "properties": {f"property number {place}": INTEGER for place in range(5000)}}
    with pytest.raises(RequestError, match="bytes"):
        normalize_schema(large, param="schema")


def test_the_schema_itself_stays_as_it_was() -> None:
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}, "any": True}}
    normal = normalize_schema(schema, param="schema")
    assert schema["properties"] == {"day": {"type": "string", "format": "date"}, "any": True}
    assert set(normal["properties"]["day"]) == {"type", "pattern"}
    assert normal["properties"]["any"] == {}


def test_constants_that_look_like_schemas_are_left_alone() -> None:
    value = {"pattern": "a.b", "type": "strin", "format": "date"}
    assert normalize_schema({"const": value}, param="schema") == {"const": value}
    described = {"type": "string", "default": {"pattern": "x"}, "examples": [value]}
    assert normalize_schema(described, param="schema") == described
