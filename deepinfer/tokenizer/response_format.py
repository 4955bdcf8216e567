"""OpenAI's `response_format`: the one place that reads it, for the prompt and for the grammar."""

from __future__ import annotations

from typing import Any

import msgspec

from deepinfer.errors import shown
from deepinfer.tokenizer.tools import check_json, invalid


class ResponseFormat(msgspec.Struct, frozen=True):
    """`schema`: the JSON Schema that was given; None asks for any JSON object."""

    schema: dict[str, Any] | None = None

    @property
    def shown_schema(self) -> dict[str, Any]:
        """What the prompt shows the model."""
        return {"type": "json_object"} if self.schema is None else self.schema


def parse_response_format(value: object) -> ResponseFormat | None:
    """Return what `value` asks for, None for free text. Raises RequestError with `param` at the wrong field."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid("response_format", f"must be an object with a type, not {type(value).__name__}")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat()
    if kind != "json_schema":
        raise invalid("response_format.type", f"is {shown(kind)}; use 'text', 'json_object' or 'json_schema'")
    wrapper = value.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise invalid("response_format.json_schema.schema", "must be a JSON Schema object")
    check_json(schema, "response_format.json_schema.schema")
    return ResponseFormat(schema)
