"""Random JSON Schemas whose answers are short: strings, arrays and numbers are bounded."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "city", "n", 'q"uote', "é", "x y", "0"]
PATTERNS = [r"^[a-z]{1,5}$", r"^(?:yes|no)!?$", r"^\d{2}:\d{2}$", r"^.{2}$", r"[^a-m]{1,3}"]
FORMATS = ["date", "time", "date-time", "ipv4", "uuid"]


def random_schema(numbers: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema that can be enforced, at most `depth` deep."""
    makers = [_string, _integer, _number, _literal, _string, _integer]
    if depth > 0:
        makers += [_object, _object, _array, _array, _choice]
    schema = numbers.choice(makers)(numbers, depth - 1)
    return {"title": "t", **schema} if numbers.random() < 0.2 else schema


def _string(numbers: random.Random, depth: int) -> dict[str, Any]:
    match numbers.randrange(3):
        case 0:
            low = numbers.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + numbers.randrange(6)}
        case 1:
            return {"type": "string", "pattern": numbers.choice(PATTERNS)}
        case _:
            return {"type": "string", "format": numbers.choice(FORMATS)}


def _integer(numbers: random.Random, depth: int) -> dict[str, Any]:
    low = numbers.randrange(-1000, 1000)
    schema = {"type": "integer", "minimum": low, "maximum": low + numbers.randrange(500)}
    if numbers.random() < 0.2:
        schema = {"type": "integer", "minimum": 10, "maximum": 60, "multipleOf": numbers.randrange(2, 9)}
    return schema


def _number(numbers: random.Random, depth: int) -> dict[str, Any]:
    low = numbers.randrange(-100, 100) / 4
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + numbers.randrange(1, 50)}


def _literal(numbers: random.Random, depth: int) -> dict[str, Any]:
    values = ["x", 'a"b\\', "é\n", 1, -2.5, None, True, {"k": [1, {}]}, []]
    return numbers.choice([{"enum": numbers.sample(values, 3)}, {"const": numbers.choice(values)}, {"type": "boolean"}])


def _object(numbers: random.Random, depth: int) -> dict[str, Any]:
    names = numbers.sample(NAMES, numbers.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(numbers, depth) for name in names},
        "required": [name for name in names if numbers.random() < 0.7],
    }


def _array(numbers: random.Random, depth: int) -> dict[str, Any]:
    low = numbers.randrange(3)
    schema = {"type": "array", "items": random_schema(numbers, depth), "minItems": low, "maxItems": low + 2}
    if numbers.random() < 0.3:
        schema["prefixItems"] = [random_schema(numbers, 0)]
    return schema


def _choice(numbers: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(numbers, depth) for _ in range(2)]}
