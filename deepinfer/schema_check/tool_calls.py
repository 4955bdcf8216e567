"""From the tools of a forced call to the specification that a rank compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from deepinfer.errors import RequestError, shown
from deepinfer.protocol import GrammarSpec
from deepinfer.schema_check.schema import normalize_schema
from deepinfer.tokenizer import ToolSchema

_KEYWORDS = frozenset(
    ("type", "properties", "required", "additionalProperties", "unevaluatedProperties", "$defs", "definitions")
)
_ANNOTATIONS = frozenset(("title", "description", "$comment", "default", "examples", "$schema", "$id"))
_PARAMETER_NAME = re.compile(r'[^"<>\\\x00-\x1f]+')


def grammar_of_tools(tools: Sequence[ToolSchema]) -> GrammarSpec:
    """Return the specification of exactly one call of one of `tools`; raises RequestError (param "tools").

    An argument that is declared a string is written as raw text, all others as JSON, as the markup wants it.
    """
    functions = []
    for tool in tools:
        place = f"tools: the parameters of {shown(tool.name)}"
        try:
            parameters = normalize_schema({"type": "object", **tool.parameters}, param=place)
            _check_parameters(parameters, place)
        except RequestError as error:
            raise RequestError(str(error), code=error.code, param="tools") from error
        functions.append({"name": tool.name, "parameters": parameters})
    return GrammarSpec(kind="tool_calls", text=json.dumps(functions, ensure_ascii=False))


def _check_parameters(parameters: dict[str, Any], place: str) -> None:
    for keyword in parameters.keys() - _KEYWORDS - _ANNOTATIONS:
        raise _refuse(place, keyword, "can't be enforced in a forced call; describe the parameters by 'properties'")
    if parameters["type"] != "object" or parameters.get("additionalProperties", False) is not False:
        keyword = "type" if parameters["type"] != "object" else "additionalProperties"
        raise _refuse(place, keyword, "must describe an object with declared properties")
    for name, schema in parameters.get("properties", {}).items():
        if not _PARAMETER_NAME.fullmatch(name):
            raise _refuse(place, f"properties/{name}", "has a name that tool call markup can't hold; rename it")
        if schema.get("type") == "string" and "format" in schema:
            raise _refuse(place, f"properties/{name}/format", "can't be enforced for raw text; use a pattern")
        if re.search(r'"\$ref": "#(/properties|")', json.dumps(schema)):
            raise _refuse(place, f"properties/{name}", "refers to other parameters; refer to '#/$defs/...'")


def _refuse(place: str, pointer: str, problem: str) -> RequestError:
    return RequestError(f"{place}: at #/{pointer}: {problem}", code="unsupported_schema", param="tools")
