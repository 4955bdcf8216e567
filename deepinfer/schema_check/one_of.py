"""Whether the branches of a `oneOf` plainly exclude each other, so that any of them will do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from deepinfer.schema_check.pointers import Pointer, parse_reference

_MAX_REFERENCES = 32


def are_disjoint(branches: list[Any], schemas: Mapping[Pointer, Any]) -> bool:
    """Return whether no value can satisfy two of `branches`; `schemas` holds the document's schemas by pointer."""
    resolved = [_resolve(branch, schemas) for branch in branches]
    return all(_exclude(left, right, schemas) for left, right in itertools.combinations(resolved, 2))


def _resolve(schema: Any, schemas: Mapping[Pointer, Any]) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            target = parse_reference(schema["$ref"])
            schema = schemas.get(target) if target is not None else None
        elif "allOf" in schema:
            schema = schema["allOf"][0]
        else:
            return schema
    return None


def _exclude(left: Any, right: Any, schemas: Mapping[Pointer, Any]) -> bool:
    if not isinstance(left, dict) or not isinstance(right, dict):
        return False
    left_types, right_types = _types(left), _types(right)
    if left_types and right_types and not left_types & right_types:
        return True
    left_values, right_values = _values(left), _values(right)
    if left_values is not None and right_values is not None and not left_values & right_values:
        return True
    return _tells_apart(left, right, schemas)


def _tells_apart(left: dict[str, Any], right: dict[str, Any], schemas: Mapping[Pointer, Any]) -> bool:
    """Whether some property that both require has different constants in them. Both must be objects only."""
    if _types(left) != {"object"} or _types(right) != {"object"}:
        return False
    for name in set(left.get("required", ())) & set(right.get("required", ())):
        first = _values(_resolve(left["properties"][name], schemas))
        second = _values(_resolve(right["properties"][name], schemas))
        if first is not None and second is not None and not first & second:
            return True
    return False


def _values(schema: Any) -> set[str] | None:
    """The values that an enumeration allows, as JSON texts; None for other schemas. 1 and 1.0 are the same value."""
    if not isinstance(schema, dict) or not ("const" in schema or "enum" in schema):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return {json.dumps(_canonical(value), sort_keys=True) for value in values}


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _canonical(entry) for name, entry in value.items()}
    return value


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows, integers among numbers; empty if it does not say."""
    values = _values(schema)
    if values is not None:
        return {_type_name(json.loads(value)) for value in values}
    declared = schema.get("type")
    if declared is None:
        return {"object"} if "properties" in schema else set()
    types = declared if isinstance(declared, list) else [declared]
    return {"number" if name == "integer" else name for name in types}


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
