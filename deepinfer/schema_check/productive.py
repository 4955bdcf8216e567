"""Whether any finite JSON value satisfies a schema that has passed the other checks; endless recursion has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.schema_check.pointers import Pointer, child, parse_reference


def has_finite_instance(root: Pointer, schemas: Mapping[Pointer, Any]) -> bool:
    """Return whether the schema at `root` has one; `schemas` holds every schema of the document by its pointer.

    A schema is known to have one once those that it can't do without are known to: repeat until nothing is added.
    """
    known: set[Pointer] = set()
    grown = True
    while grown and root not in known:
        found = {pointer for pointer in schemas if pointer not in known and _follows(pointer, schemas, known)}
        known |= found
        grown = bool(found)
    return root in known


def _follows(pointer: Pointer, schemas: Mapping[Pointer, Any], known: set[Pointer]) -> bool:
    schema = schemas[pointer]
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return parse_reference(schema["$ref"]) in known
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return any(child(child(pointer, name), str(place)) in known for place in range(len(schema[name])))
    if "const" in schema or "enum" in schema:
        return True
    declared = schema.get("type", ["object"] if "properties" in schema else ["array"])
    types = declared if isinstance(declared, list) else [declared]
    return any(_type_follows(name, schema, pointer, known) for name in types)


def _type_follows(name: str, schema: dict[str, Any], pointer: Pointer, known: set[Pointer]) -> bool:
    if name == "object":
        needed = [child(child(pointer, "properties"), entry) for entry in schema.get("required", ())]
        if schema.get("minProperties", 0) > len(needed) and "additionalProperties" in schema:
            needed.append(child(pointer, "additionalProperties"))
        return all(entry in known for entry in needed) and _has_enough(schema, pointer, known)
    if name == "array":
        num_needed, num_prefix = schema.get("minItems", 0), len(schema.get("prefixItems", ()))
        prefix = child(pointer, "prefixItems")
        needed = [child(prefix, str(place)) for place in range(min(num_needed, num_prefix))]
        if num_needed > num_prefix:
            needed.append(child(pointer, "items"))
        return all(entry in known for entry in needed)
    return True


def _has_enough(schema: dict[str, Any], pointer: Pointer, known: set[Pointer]) -> bool:
    """Whether as many declared properties as are demanded have a value."""
    properties = schema.get("properties", {})
    if not properties:
        return True
    num_known = sum(child(child(pointer, "properties"), name) in known for name in properties)
    return bool(num_known >= schema.get("minProperties", 0))
