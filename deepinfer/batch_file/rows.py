"""One input line to one request: strict checks whose errors belong to the row alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from deepinfer.batch_file.fields import (
    CHAT,
    COMPLETIONS,
    FIELDS,
    Endpoint,
    check_fields,
    sampling_params,
)
from deepinfer.batch_file.lines import MAX_LINE_BYTES, InputLine
from deepinfer.errors import RequestError, invalid_value, shown
from deepinfer.outputs import ChatOptions, Row

_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A checked row: the request, and what its output line needs. `fields` are the body's fields that are set."""

    custom_id: str
    endpoint: Endpoint
    row: Row
    fields: frozenset[str]


def decode_line(line: InputLine) -> dict[str, Any]:
    """Return the JSON object of `line`. Raises RequestError when it holds none."""
    if line.is_too_long:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES} bytes; split the request", code="line_too_long")
    try:
        decoded = msgspec.json.decode(line.data)
    except RecursionError as error:
        raise RequestError("the line is nested too deeply to be read", code="invalid_json") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message = f"the line is no valid JSON in UTF-8 ({error}); a lone surrogate, NaN or Infinity is none either"
        raise RequestError(message, code="invalid_json") from error
    if not isinstance(decoded, dict):
        raise RequestError(f"the line must be a JSON object, not {shown(decoded)}", code="invalid_json")
    return decoded


def custom_id_of(fields: Mapping[str, Any]) -> str | None:
    """Return the row's custom_id when it is a usable one."""
    value = fields.get("custom_id")
    return value if isinstance(value, str) and value else None


def build_row(fields: Mapping[str, Any], tag: int) -> BatchRow:
    """Return the request of a decoded line, tagged with its number. Raises RequestError naming the bad field."""
    custom_id = custom_id_of(fields)
    if custom_id is None:
        raise invalid_value("custom_id", f"must be a string that is not empty, not {shown(fields.get('custom_id'))}")
    for name in fields:
        if name not in _KEYS:
            raise RequestError(
                f"{shown(name)} is no field of a row; a row has {', '.join(_KEYS)}", code="unknown_field", param=name
            )
    if fields.get("method") != "POST":
        raise invalid_value("method", f"must be 'POST', not {shown(fields.get('method'))}")
    endpoint = fields.get("url")
    if not isinstance(endpoint, str) or endpoint not in FIELDS:
        raise invalid_value("url", f"must be {CHAT} or {COMPLETIONS}, not {shown(endpoint)}")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise invalid_value("body", f"must be an object, not {shown(body)}")
    present = check_fields(body, endpoint)
    params = sampling_params(present, endpoint)
    if endpoint == CHAT:
        row = Row(tag=tag, messages=_messages(present), chat=_chat_options(present), params=params, label=custom_id)
    else:
        options = ChatOptions(response_format=present.get("response_format"))
        row = Row(tag=tag, prompt=_prompt(present), chat=options, params=params, label=custom_id)
    return BatchRow(custom_id, endpoint, row, frozenset(present))


def _messages(present: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = present.get("messages")
    if messages is None:
        raise invalid_value("messages", "is missing; give a list of messages")
    return cast("list[dict[str, Any]]", messages)


def _chat_options(present: Mapping[str, Any]) -> ChatOptions:
    return ChatOptions(
        thinking=present.get("thinking", True),
        reasoning_effort=present.get("reasoning_effort"),
        tools=present.get("tools"),
        tool_choice=present.get("tool_choice"),
        response_format=present.get("response_format"),
    )


def _prompt(present: Mapping[str, Any]) -> str | list[int]:
    prompt = present.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise invalid_value("prompt", f"must be text or a list of token ids, not {shown(prompt)}")
    if not prompt:
        raise invalid_value("prompt", 'must hold at least one token id; "" is the prompt that is BOS alone')
    if all(isinstance(item, str | list) for item in prompt):
        raise invalid_value("prompt", f"must be one prompt, not a list of {len(prompt)}; write one row for each")
    for place, item in enumerate(prompt):
        if not isinstance(item, int) or isinstance(item, bool):
            raise invalid_value("prompt", f"must be text or a list of token ids; item {place} is {shown(item)}")
        if not 0 <= item < 2**31:
            raise invalid_value("prompt", f"must hold token ids; item {place} is {shown(item)}")
    return prompt
