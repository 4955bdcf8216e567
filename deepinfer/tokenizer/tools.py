"""Tools that a chat request declares: checked once, used by the prompt and by the reader of the answer."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from deepinfer.errors import RequestError, shown

MAX_NESTING = 100  # the vendor's package stops at 128
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}


class ToolSchema(msgspec.Struct, frozen=True):
    """One declared function. `parameters` is its JSON Schema as plain JSON values."""

    name: str
    description: str
    parameters: dict[str, Any]

    def declares(self, parameter: str) -> bool:
        """Whether the schema lists this parameter by name."""
        return parameter in self._properties()

    def is_string(self, parameter: str) -> bool:
        """Whether the schema says that this parameter is a string and nothing else."""
        declared = self._properties().get(parameter)
        return isinstance(declared, dict) and declared.get("type") == "string"

    def _properties(self) -> dict[str, Any]:
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, dict) else {}


def parse_tools(tools: object) -> tuple[ToolSchema, ...]:
    """Tools of an OpenAI request body (`tools`), None for none. Raises `RequestError` with the path of the fault."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise invalid("tools", f"must be a list, not {type(tools).__name__}")
    parsed = tuple(_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, tool in enumerate(parsed):
        if tool.name in seen:
            raise invalid(f"tools[{index}].function.name", f"{shown(tool.name)} is declared twice; rename one of them")
        seen.add(tool.name)
    return parsed


def _parse_tool(tool: object, path: str) -> ToolSchema:
    if not isinstance(tool, dict):
        raise invalid(path, f"must be an object, not {type(tool).__name__}")
    if tool.get("type", "function") != "function":
        raise invalid(f"{path}.type", f"is {shown(tool['type'])}; only 'function' is supported")
    refuse_unknown_keys(tool, {"type", "function"}, path)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{path}.function", "must be an object with a name")
    path = f"{path}.function"
    refuse_unknown_keys(function, _FUNCTION_KEYS, path)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{path}.name", f"is {shown(name)}; use letters, digits, '_' and '-'")
    if function.get("strict"):
        raise RequestError(
            f"{path}.strict: arguments can't be enforced; leave it out or set it to false",
            code="not_available",
            param=f"{path}.strict",
        )
    description = function.get("description")
    if description is not None:
        check_text(description, f"{path}.description")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{path}.parameters", f"must be a JSON Schema object, not {type(parameters).__name__}")
    check_json(parameters, f"{path}.parameters")
    return ToolSchema(name, description or "", parameters or {})


def invalid(param: str, message: str) -> RequestError:
    """The error of a wrong value at `param`."""
    return RequestError(f"{param}: {message}", code="invalid_value", param=param)


def check_text(value: object, param: str) -> str:
    """`value` if it is valid Unicode text."""
    if not isinstance(value, str):
        raise invalid(param, f"must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(param, f"holds a lone surrogate at character {error.start}; remove it") from error
    return value


def check_json(value: object, param: str) -> None:
    """Refuse what has no JSON form (other types, NaN, lone surrogates) and nesting beyond `MAX_NESTING`."""
    _check_nesting(value, param, MAX_NESTING)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise invalid(param, f"is no valid JSON ({error})") from error


def _check_nesting(value: object, param: str, depth: int) -> None:
    if depth == 0:
        raise invalid(param, f"is nested deeper than {MAX_NESTING} levels; flatten it")
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _check_nesting(entry, param, depth - 1)


def refuse_unknown_keys(value: dict[Any, Any], known: set[str], path: str) -> None:
    """Refuse a key that is not known, unless its value says nothing (null or an empty list)."""
    for key, entry in value.items():
        if key not in known and entry not in (None, []):
            raise invalid(f"{path}.{key}", f"is not known; known here: {', '.join(sorted(known))}")
