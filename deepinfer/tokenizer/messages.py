"""Messages of a chat request in OpenAI form, checked into one plain type.

Roles, content lists and arguments given as text are those that the vendor's package `deepseek_recipe` 0.2 takes.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from deepinfer.errors import RequestError, shown
from deepinfer.tokenizer.tools import check_json, check_text, invalid, refuse_unknown_keys

_KNOWN_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name", "task"},
    "assistant": {"role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "prefix"},
    "tool": {"role", "content", "name", "tool_call_id"},
    "latest_reminder": {"role", "content", "name"},
}
TASK_TOKENS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
_BLANK_LINE = "\n\n"


class HistoryCall(msgspec.Struct, frozen=True):
    """A tool call of an earlier answer; `arguments` is JSON text of an object, or free text."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One checked message. `name` of the request has no place in the chat format and is dropped."""

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[HistoryCall, ...] = ()
    tool_call_id: str | None = None
    prefix: bool = False
    task: str | None = None


def parse_messages(messages: object) -> tuple[ChatMessage, ...]:
    """Messages of a request body. Raises `RequestError` whose `param` is a path such as `messages[2].content`."""
    if not isinstance(messages, list | tuple):
        raise invalid("messages", f"must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise invalid("messages", "is empty; give at least one message")
    parsed = tuple(_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    _check_order(parsed)
    return parsed


def _parse_message(message: object, path: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise invalid(path, f"must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    known = _KNOWN_KEYS.get(role) if isinstance(role, str) else None
    if known is None:
        raise invalid(f"{path}.role", f"is {shown(role)}; use one of {', '.join(_KNOWN_KEYS)}")
    assert isinstance(role, str)
    refuse_unknown_keys(message, known, path)
    if role == "assistant":
        return _parse_assistant(message, path)
    task = message.get("task")
    if task is not None and (not isinstance(task, str) or task not in TASK_TOKENS):
        raise invalid(f"{path}.task", f"is {shown(task)}; use one of {', '.join(TASK_TOKENS)}")
    call_id = message.get("tool_call_id")
    return ChatMessage(
        role=role,
        content=_parse_content(message.get("content"), f"{path}.content"),
        tool_call_id=None if call_id is None else check_text(call_id, f"{path}.tool_call_id"),
        task=task,
    )


def _parse_assistant(message: dict[str, Any], path: str) -> ChatMessage:
    content = message.get("content")
    reasoning = _parse_reasoning(message, path)
    prefix = message.get("prefix", False)
    if not isinstance(prefix, bool | None):
        raise invalid(f"{path}.prefix", f"is {shown(prefix)}; use true or false")
    calls = _parse_calls(message.get("tool_calls"), f"{path}.tool_calls")
    if content is None and not calls and not (prefix and reasoning):
        raise invalid(f"{path}.content", "is missing; an assistant message needs content or tool_calls")
    if prefix and calls:
        raise invalid(f"{path}.prefix", "can't be used with tool_calls; only text can be continued")
    return ChatMessage(
        role="assistant",
        content="" if content is None else _parse_content(content, f"{path}.content"),
        reasoning=reasoning,
        tool_calls=calls,
        prefix=bool(prefix),
    )


def _parse_reasoning(message: dict[str, Any], path: str) -> str | None:
    given = [key for key in ("reasoning_content", "reasoning") if message.get(key) is not None]
    if not given:
        return None
    if len(given) == 2 and message["reasoning"] != message["reasoning_content"]:
        raise invalid(f"{path}.reasoning", "differs from reasoning_content; give one of them")
    return check_text(message[given[0]], f"{path}.{given[0]}")


def _parse_content(content: object, path: str) -> str:
    if isinstance(content, str):
        return check_text(content, path)
    if not isinstance(content, list | tuple):
        raise invalid(path, f"must be text or a list of text parts, not {type(content).__name__}")
    return _BLANK_LINE.join(_parse_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _parse_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(path, f"must be an object with type and text, not {type(part).__name__}")
    kind = part.get("type")
    if kind == "text":
        refuse_unknown_keys(part, {"type", "text"}, path)
        return check_text(part.get("text"), f"{path}.text")
    if isinstance(kind, str) and "image" in kind:
        raise RequestError(f"{path}: images are not supported; send text parts only", code="not_available", param=path)
    raise invalid(f"{path}.type", f"is {shown(kind)}; only 'text' parts are supported")


def _parse_calls(calls: object, path: str) -> tuple[HistoryCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list | tuple):
        raise invalid(path, f"must be a list, not {type(calls).__name__}")
    return tuple(_parse_call(call, f"{path}[{index}]") for index, call in enumerate(calls))


def _parse_call(call: object, path: str) -> HistoryCall:
    if not isinstance(call, dict):
        raise invalid(path, f"must be an object, not {type(call).__name__}")
    refuse_unknown_keys(call, {"id", "type", "function", "index"}, path)
    if call.get("type", "function") != "function":
        raise invalid(f"{path}.type", f"is {shown(call['type'])}; only 'function' is supported")
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{path}.function", "must be an object with name and arguments")
    refuse_unknown_keys(function, {"name", "arguments"}, f"{path}.function")
    name = check_text(function.get("name"), f"{path}.function.name")
    if not name or any(character in name for character in '"<>\n'):
        raise invalid(f"{path}.function.name", f"is {shown(name)}, which no tool can have")
    call_id = call.get("id")
    return HistoryCall(
        id="" if call_id is None else check_text(call_id, f"{path}.id"),
        name=name,
        arguments=_parse_arguments(function.get("arguments"), f"{path}.function.arguments"),
    )


def _parse_arguments(arguments: object, path: str) -> str:
    """Arguments as text. An object is written as JSON, text that is JSON of a text is unwrapped once."""
    if isinstance(arguments, dict):
        check_json(arguments, path)
        return json.dumps(arguments, ensure_ascii=False)
    text = check_text("{}" if arguments is None else arguments, path)
    try:
        inner = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return check_text(inner, path) if isinstance(inner, str) else text


def _check_order(messages: tuple[ChatMessage, ...]) -> None:
    last = len(messages) - 1
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.prefix and index != last:
            raise invalid(f"{path}.prefix", "is set on a message that is not the last one")
        if message.task is not None and index != last:
            raise invalid(f"{path}.task", "is set on a message that is not the last one")
        if message.role == "assistant" and index and messages[index - 1].role == "assistant":
            raise invalid(path, "follows another assistant message; join them or put a user or tool message between")
    if messages[last].role == "assistant" and not messages[last].prefix:
        raise invalid(
            f"messages[{last}]",
            "the last message is the assistant's; set its prefix to true to continue it, or add a user message",
        )
