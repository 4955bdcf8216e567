"""A forced tool call as a grammar: the markup of `tokenizer/dsml.py`, in which the mark is a token and never text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import xgrammar

from deepinfer.errors import RequestError
from deepinfer.structured_outputs.json_grammar import json_grammar

# A raw argument ends at the mark, which is no text: so it may hold anything but most control characters.
_CHARACTER = r"[^\0-\x08\x0b-\x1f\x7f\ud800-\udfff]"


def tool_call_grammar(tools: Sequence[dict[str, Any]], dsml_id: int | None) -> xgrammar.Grammar:
    """Return the grammar of exactly one call of one of `tools` (`name`, `parameters` as `schema_check` leaves them)."""
    if dsml_id is None:
        raise RequestError("this checkpoint's tokenizer has no token for tool calls", code="not_available")
    calls = _any_of([_one_call(tool, dsml_id) for tool in tools])
    begin, end = _marked("\n\n<", dsml_id, " calls>\n"), _marked("\n</", dsml_id, " calls>")
    return xgrammar.Grammar.concat(begin, calls, end)


def _one_call(tool: dict[str, Any], dsml_id: int) -> xgrammar.Grammar:
    """The parameters stand in the order of their declaration; those that are not required may be missing."""
    parameters = tool["parameters"]
    properties, required = parameters.get("properties", {}), set(parameters.get("required", ()))
    definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    parts = [_marked("<", dsml_id, f' invoke name="{tool["name"]}">\n')]
    for name, schema in properties.items():
        parameter = _one_parameter(name, {**definitions, **schema}, dsml_id)
        parts.append(parameter if name in required else _any_of([parameter, _ebnf('""')]))
    parts.append(_marked("</" if properties else "\n</", dsml_id, " invoke>"))
    return xgrammar.Grammar.concat(*parts)


def _one_parameter(name: str, schema: dict[str, Any], dsml_id: int) -> xgrammar.Grammar:
    is_text = schema.get("type") == "string"
    begin = _marked("<", dsml_id, f' parameter name="{name}" string="{"true" if is_text else "false"}">')
    value = _raw_text(schema) if is_text else json_grammar(json.dumps(schema))
    return xgrammar.Grammar.concat(begin, value, _marked("</", dsml_id, " parameter>\n"))


def _raw_text(schema: dict[str, Any]) -> xgrammar.Grammar:
    """The text of a string argument: not quoted, nothing escaped."""
    if "const" in schema or "enum" in schema:
        return _ebnf(" | ".join(_literal(value) for value in schema.get("enum", [schema.get("const")])))
    if "pattern" in schema:
        return xgrammar.Grammar.from_regex(schema["pattern"])
    if "minLength" in schema or "maxLength" in schema:
        return _ebnf(f"{_CHARACTER}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    return _ebnf(f"{_CHARACTER}*")


def _marked(before: str, dsml_id: int, behind: str) -> xgrammar.Grammar:
    return _ebnf(f"{_literal(before)} Token({dsml_id}) {_literal(behind)}")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _ebnf(rule: str) -> xgrammar.Grammar:
    return xgrammar.Grammar.from_ebnf(f"root ::= {rule}")


def _any_of(grammars: Iterable[xgrammar.Grammar]) -> xgrammar.Grammar:
    choices = list(grammars)
    return choices[0] if len(choices) == 1 else xgrammar.Grammar.union(*choices)
