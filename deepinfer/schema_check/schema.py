"""Which JSON Schemas can be enforced. A keyword that can't is refused with its JSON pointer, never ignored.

A grammar of xgrammar 0.2.9 is made from one of these forms of a schema, and what stands beside it has no effect there,
so it is refused here: `$ref`, `const`, `enum`, `anyOf`, `oneOf`, a single `allOf`, or `type` with the keywords of the
type. Objects and arrays are closed: an answer has no properties or items that the schema does not describe. Draft
2020-12 is meant. What of a keyword is enforced, and what not, was found by trying; the tests repeat it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from deepinfer.errors import RequestError, shown
from deepinfer.schema_check.formats import FORMAT_PATTERNS, NATIVE_FORMATS
from deepinfer.schema_check.one_of import are_disjoint
from deepinfer.schema_check.pointers import Pointer, child, parse_reference, show_pointer
from deepinfer.schema_check.productive import has_finite_instance
from deepinfer.schema_check.regex import normalize_regex, whole_text_pattern

MAX_SCHEMA_BYTES = 128 * 1024
MAX_DEPTH = 32
MAX_COUNT = 100_000  # of lengths and numbers of items
MAX_WHOLE_NUMBER = 2**53 - 1

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
)
_ROOT_ONLY = frozenset(("$schema", "$id"))
_DEFINITIONS = ("$defs", "definitions")
_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "minProperties", "maxProperties", "unevaluatedProperties")
    ),
}
_TYPED_KEYWORDS = frozenset().union(*_OF_TYPE.values())


def normalize_schema(schema: object, *, param: str) -> dict[str, Any]:
    """Return a copy of `schema` in the form for the grammar engine: patterns went through `schema_check.regex`.

    Raises RequestError (code "unsupported_schema") for a schema that can't be enforced: the message names the keyword,
    its JSON pointer and the cure; `param` is the field that holds the schema.
    """
    checker = _Checker(param)
    checker.check(schema)
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for pointer, pattern in checker.patterns.items():
        _entry(copy, pointer[:-1])[pointer[-1]] = pattern
    for pointer in checker.formats:
        owner = _entry(copy, pointer[:-1])
        owner["pattern"] = whole_text_pattern(FORMAT_PATTERNS[owner.pop("format")])
    for pointer, found in checker.schemas.items():
        if found is True:  # not read by xgrammar in every place
            owner = _entry(copy, pointer[:-1])
            owner[int(pointer[-1]) if isinstance(owner, list) else pointer[-1]] = {}
    return copy


class _Checker:
    def __init__(self, param: str) -> None:
        self.patterns: dict[Pointer, str] = {}
        self.formats: list[Pointer] = []
        self._param = param
        self.schemas: dict[Pointer, Any] = {}
        self._references: list[tuple[Pointer, Pointer]] = []

    def check(self, schema: object) -> None:
        if not isinstance(schema, dict):
            self._refuse((), f"a schema must be an object, not {type(schema).__name__}")
        self._check_size(schema)
        self._walk(schema, ())
        for pointer, target in self._references:
            if target not in self.schemas:
                self._refuse(pointer, f"refers to {show_pointer(target)}, where there is no schema")
        for pointer, found in self.schemas.items():
            if isinstance(found, dict) and "oneOf" in found and not are_disjoint(found["oneOf"], self.schemas):
                self._refuse(
                    child(pointer, "oneOf"),
                    "can be enforced only if its branches differ in type, constant, or in a required constant "
                    "property; use 'anyOf'",
                )
        if not has_finite_instance((), self.schemas):
            self._refuse((), "no finite answer satisfies this schema; end its recursion")

    def _check_size(self, schema: dict[str, Any]) -> None:
        stack: list[tuple[Any, int]] = [(schema, 1)]
        while stack:
            value, depth = stack.pop()
            if depth > 2 * MAX_DEPTH:
                self._refuse((), f"is nested deeper than {MAX_DEPTH} schemas; flatten it")
            if isinstance(value, dict | list):
                entries = value.values() if isinstance(value, dict) else value
                stack.extend((entry, depth + 1) for entry in entries)
        try:
            size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError) as error:
            self._refuse((), f"is no valid JSON ({error})")
        if size > MAX_SCHEMA_BYTES:
            self._refuse((), f"has {size} bytes, {MAX_SCHEMA_BYTES} are allowed")

    def _walk(self, schema: object, pointer: Pointer) -> None:
        if not isinstance(schema, dict | bool):
            self._refuse(pointer, f"a schema must be an object or a boolean, not {type(schema).__name__}")
        self.schemas[pointer] = schema
        if isinstance(schema, bool):
            if not schema:
                self._refuse(pointer, "the schema false allows nothing; leave the property out")
            return
        keywords = set(schema) - ANNOTATIONS - set(_DEFINITIONS) - (_ROOT_ONLY if not pointer else frozenset())
        for name in _DEFINITIONS:
            if name in schema:
                self._walk_map(schema[name], child(pointer, name))
        form = next((name for name in _FORMS if name in keywords), None)
        if form is None:
            self._check_typed(schema, keywords, pointer)
            return
        allowed = {form, "type"} if form in ("const", "enum") else {form}
        for name in sorted(keywords - allowed):
            self._refuse(
                child(pointer, name), f"can't be enforced beside {shown(form)}; move it into a schema of its own"
            )
        self._check_form(form, schema, pointer)

    def _walk_map(self, schemas: object, pointer: Pointer) -> None:
        if not isinstance(schemas, dict):
            self._refuse(pointer, "must be an object of schemas")
        for name, schema in schemas.items():
            self._walk(schema, child(pointer, name))

    def _walk_list(self, schemas: object, pointer: Pointer) -> None:
        if not isinstance(schemas, list) or not schemas:
            self._refuse(pointer, "must be a list of at least one schema")
        for place, schema in enumerate(schemas):
            self._walk(schema, child(pointer, str(place)))

    def _check_form(self, form: str, schema: dict[str, Any], pointer: Pointer) -> None:
        value, at = schema[form], child(pointer, form)
        if form == "$ref":
            target = parse_reference(value)
            if target is None:
                self._refuse(at, f"is {shown(value)}; only references into this schema ('#/...') can be followed")
            self._references.append((at, target))
        elif form in ("anyOf", "oneOf"):
            self._walk_list(value, at)
        elif form == "allOf":
            self._walk_list(value, at)
            if len(value) > 1:
                self._refuse(at, "can be enforced with one entry only; merge the entries into one schema")
        else:
            values = [value] if form == "const" else value
            if not isinstance(values, list) or not values:
                self._refuse(at, "must be a list of at least one value")
            self._check_values(values, schema, at)

    def _check_values(self, values: list[Any], schema: dict[str, Any], pointer: Pointer) -> None:
        types = self._types(schema, pointer[:-1]) if "type" in schema else TYPES
        for value in values:
            if not any(_is_of_type(value, name) for name in types):
                self._refuse(pointer, f"has the value {shown(value)}, which is not of the type that stands beside it")

    def _types(self, schema: dict[str, Any], pointer: Pointer) -> tuple[str, ...]:
        declared = schema["type"]
        types = declared if isinstance(declared, list) else [declared]
        for name in types:
            if name not in TYPES:
                self._refuse(child(pointer, "type"), f"is {shown(name)}; use {', '.join(TYPES)}")
        if not types or len(set(types)) < len(types):
            self._refuse(child(pointer, "type"), "must be a type or a list of different types")
        return tuple(types)

    def _check_typed(self, schema: dict[str, Any], keywords: set[str], pointer: Pointer) -> None:
        asserted = keywords - {"type"}
        for name in sorted(asserted - _TYPED_KEYWORDS):
            self._refuse(child(pointer, name), f"the keyword {shown(name)} can't be enforced; leave it out")
        if "type" not in schema:
            types = tuple(name for name in ("object", "array") if asserted and asserted <= _OF_TYPE[name])
            if asserted and (not types or not asserted & {"properties", "items", "prefixItems"}):
                name = min(asserted)
                self._refuse(child(pointer, name), f"the keyword {shown(name)} is enforced only beside 'type'; add it")
        else:
            types = self._types(schema, pointer)
        usable = frozenset().union(*(_OF_TYPE[name] for name in types)) if types else frozenset()
        for name in sorted(asserted - usable):
            self._refuse(child(pointer, name), f"the keyword {shown(name)} means nothing for {' or '.join(types)}")
        for name in types:
            check = self._checks().get(name)
            if check is not None:
                check(schema, pointer)

    def _checks(self) -> dict[str, Callable[[dict[str, Any], Pointer], None]]:
        return {
            "string": self._check_string,
            "integer": self._check_integer,
            "number": self._check_number,
            "array": self._check_array,
            "object": self._check_object,
        }

    def _check_string(self, schema: dict[str, Any], pointer: Pointer) -> None:
        self._check_counts(schema, pointer, "minLength", "maxLength")
        rivals = [name for name in ("pattern", "format", "minLength", "maxLength") if name in schema]
        if len(rivals) > 1 and rivals[0] in ("pattern", "format"):
            self._refuse(
                child(pointer, rivals[1]), f"can't be enforced beside {shown(rivals[0])}; say it in one pattern"
            )
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                self._refuse(child(pointer, "pattern"), "must be a string")
            place = f"{self._param}: at {show_pointer(child(pointer, 'pattern'))}"
            try:
                pattern = normalize_regex(schema["pattern"], param=place, code="unsupported_schema", in_json=True)
            except RequestError as error:
                raise RequestError(str(error), code=error.code, param=self._param) from error
            self.patterns[child(pointer, "pattern")] = whole_text_pattern(pattern)
        if "format" in schema:
            self._check_format(schema["format"], child(pointer, "format"))

    def _check_format(self, name: object, pointer: Pointer) -> None:
        if isinstance(name, str) and name in FORMAT_PATTERNS:
            self.formats.append(pointer)
        elif name not in NATIVE_FORMATS:
            known = ", ".join(sorted((*NATIVE_FORMATS, *FORMAT_PATTERNS)))
            self._refuse(pointer, f"the format {shown(name)} can't be enforced; use {known}")

    def _check_integer(self, schema: dict[str, Any], pointer: Pointer) -> None:
        for name in _OF_TYPE["integer"] & schema.keys():
            value = schema[name]
            if not _is_of_type(value, "integer") or abs(value) > MAX_WHOLE_NUMBER:
                self._refuse(
                    child(pointer, name), f"must be a whole number up to 2^53 for integers, not {shown(value)}"
                )
        if schema.get("multipleOf", 1) < 1:
            self._refuse(child(pointer, "multipleOf"), "must be above 0")
        self._check_range(schema, pointer)

    def _check_number(self, schema: dict[str, Any], pointer: Pointer) -> None:
        if "multipleOf" in schema:
            self._refuse(child(pointer, "multipleOf"), "the keyword 'multipleOf' is enforced only for type 'integer'")
        for name in _OF_TYPE["number"] & schema.keys():
            if not _is_of_type(schema[name], "number") or abs(schema[name]) > MAX_WHOLE_NUMBER:
                self._refuse(child(pointer, name), f"must be a number up to 2^53, not {shown(schema[name])}")
        self._check_range(schema, pointer)

    def _check_range(self, schema: dict[str, Any], pointer: Pointer) -> None:
        for side in ("Minimum", "Maximum"):
            if side.lower() in schema and f"exclusive{side}" in schema:
                self._refuse(
                    child(pointer, f"exclusive{side}"), f"stands beside {shown(side.lower())}; keep one of them"
                )
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        is_open = "exclusiveMinimum" in schema or "exclusiveMaximum" in schema
        if low is not None and high is not None and (low > high or (low == high and is_open)):
            name = "minimum" if "minimum" in schema else "exclusiveMinimum"
            self._refuse(child(pointer, name), f"leaves no number between {shown(low)} and {shown(high)}")

    def _check_array(self, schema: dict[str, Any], pointer: Pointer) -> None:
        self._check_counts(schema, pointer, "minItems", "maxItems")
        for name in ("uniqueItems", "unevaluatedItems"):
            if schema.get(name, False) is not False:
                self._refuse(child(pointer, name), f"the keyword {shown(name)} can't be enforced; leave it out")
        items = schema.get("items", False)
        if items is not False:
            self._walk(items, child(pointer, "items"))
        if "prefixItems" in schema:
            self._walk_list(schema["prefixItems"], child(pointer, "prefixItems"))
        num_known = len(schema.get("prefixItems", ()))
        if items is False and schema.get("minItems", 0) > num_known:
            self._refuse(child(pointer, "minItems"), "needs a schema of the items: add 'items'")

    def _check_object(self, schema: dict[str, Any], pointer: Pointer) -> None:
        self._check_counts(schema, pointer, "minProperties", "maxProperties")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        self._walk_map(properties, child(pointer, "properties"))
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._refuse(child(pointer, "required"), "must be a list of names")
        for name in required:
            if name not in properties:
                self._refuse(
                    child(pointer, "required"), f"{shown(name)} is enforced only if 'properties' has it; add it"
                )
        if schema.get("unevaluatedProperties", False) is not False:
            self._refuse(child(pointer, "unevaluatedProperties"), "can't be enforced; leave it out")
        self._check_open(schema, pointer)

    def _check_open(self, schema: dict[str, Any], pointer: Pointer) -> None:
        """Free names are for objects without declared ones: a declared one could come again in an escaped spelling."""
        additional = schema.get("additionalProperties", False)
        if additional is not False:
            at = child(pointer, "additionalProperties")
            if schema.get("properties"):
                self._refuse(at, "can't be enforced beside 'properties'; set it to false or leave it out")
            self._walk(additional, at)
        is_map = not schema.get("properties")
        if is_map and schema.get("minProperties", 0) > 1:
            self._refuse(child(pointer, "minProperties"), "is enforced above 1 only for declared properties")
        if not is_map and schema.get("minProperties", 0) > len(schema["properties"]):
            self._refuse(child(pointer, "minProperties"), "is more than there are properties")
        if schema.get("maxProperties", MAX_COUNT) < len(schema.get("required", ())):
            self._refuse(child(pointer, "maxProperties"), "is less than there are required properties")

    def _check_counts(self, schema: dict[str, Any], pointer: Pointer, low: str, high: str) -> None:
        for name in (low, high):
            if name not in schema:
                continue
            value = schema[name]
            if not _is_of_type(value, "integer") or not 0 <= value <= MAX_COUNT:
                self._refuse(child(pointer, name), f"must be a whole number from 0 to {MAX_COUNT}, not {shown(value)}")
        if schema.get(low, 0) > schema.get(high, MAX_COUNT):
            self._refuse(child(pointer, low), f"is above {shown(high)}")

    def _refuse(self, pointer: Pointer, problem: str) -> NoReturn:
        raise RequestError(
            f"{self._param}: at {show_pointer(pointer)}: {problem}", code="unsupported_schema", param=self._param
        )


def _entry(value: Any, pointer: Pointer) -> Any:
    """Return what stands at `pointer` in a JSON value."""
    for name in pointer:
        value = value[int(name) if isinstance(value, list) else name]
    return value


def _is_of_type(value: object, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and not isinstance(value, bool)
    if name == "null":
        return value is None
    kinds: dict[str, type] = {"string": str, "boolean": bool, "array": list, "object": dict}
    return isinstance(value, kinds[name])
