"""From what a user asks for (`so_args`, `response_format`) to the specification that a rank compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

import msgspec

from deepinfer.errors import invalid_value, shown
from deepinfer.protocol import GrammarSpec
from deepinfer.schema_check.regex import normalize_regex
from deepinfer.schema_check.schema import normalize_schema
from deepinfer.tokenizer import parse_response_format

MAX_GRAMMAR_CHARACTERS = 64 * 1024
_TYPES: dict[str, Literal["json", "regex", "ebnf"]] = {
    "json": "json",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "ebnf",
    "grammar": "ebnf",
}
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def grammar_of_so_args(so_args: object) -> GrammarSpec:
    """Return the specification of `so_args`. Raises RequestError with `param` at the wrong field.

    Its `schema` for JSON is an object or its JSON text; none, or an empty one, means any JSON object.
    """
    if not isinstance(so_args, Mapping):
        raise invalid_value("so_args", f"must be an object, not {type(so_args).__name__}")
    for name in so_args:
        if name not in ("schema_type", "schema"):
            raise invalid_value(f"so_args.{name}", "is not known; use schema_type and schema")
    kind = _TYPES.get(str(so_args.get("schema_type")))
    if kind is None:
        raise invalid_value("so_args.schema_type", f"is {shown(so_args.get('schema_type'))}; use {', '.join(_TYPES)}")
    schema = so_args.get("schema")
    if kind == "json":
        return _json_spec(_decode(schema), "so_args.schema")
    if not isinstance(schema, str) or not schema:
        raise invalid_value("so_args.schema", f"must be the text of the {kind}")
    _check_unicode(schema, "so_args.schema")
    if kind == "regex":
        return GrammarSpec(kind="regex", text=normalize_regex(schema, param="so_args.schema"))
    if len(schema) > MAX_GRAMMAR_CHARACTERS:
        raise invalid_value("so_args.schema", f"has {len(schema)} characters, {MAX_GRAMMAR_CHARACTERS} are allowed")
    return GrammarSpec(kind="ebnf", text=schema)


def grammar_of_response_format(response_format: object) -> GrammarSpec | None:
    """Return the specification of an OpenAI `response_format`; None for free text. Raises RequestError."""
    wanted = parse_response_format(response_format)
    if wanted is None:
        return None
    return _json_spec(_ANY_OBJECT if wanted.schema is None else wanted.schema, "response_format")


def _json_spec(schema: object, param: str) -> GrammarSpec:
    normal = normalize_schema(schema, param=param)
    return GrammarSpec(kind="json", text=json.dumps(normal, ensure_ascii=False))


def _decode(schema: object) -> object:
    if isinstance(schema, str) and schema.strip():
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise invalid_value("so_args.schema", f"is no JSON ({error})") from error
        if not isinstance(schema, dict):
            raise invalid_value("so_args.schema", f"must be a JSON Schema object, not {type(schema).__name__}")
    return _ANY_OBJECT if schema in (None, {}, "") or (isinstance(schema, str)) else schema


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_value(param, f"holds a lone surrogate at character {error.start}; remove it") from error
