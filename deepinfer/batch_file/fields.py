"""The fields of a request body: which endpoint has them, their JSON types, and how they become `SamplingParams`.

Fields are those of OpenAI's two endpoints and this engine's own. Ranges are checked where the request is admitted
(`scheduler/sampling_params.py`); here a wrong JSON type or an unknown name is refused. `null` means left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from deepinfer.errors import RequestError, invalid_value, shown
from deepinfer.protocol import SamplingParams

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"

DEFAULT_COMPLETION_TOKENS = 16
# The request layer of DeepSeek's package deepseek-recipe 0.2 uses these; the engine ends at the context limit anyway.
DEFAULT_CHAT_TOKENS = 8_192
DEFAULT_THINKING_TOKENS = 65_536
DEFAULT_MAX_EFFORT_TOKENS = 131_072

_Kind = Literal["text", "integer", "number", "switch", "strings", "integers", "object", "list", "any"]

_COMMON: dict[str, _Kind] = {
    "model": "text",
    "user": "text",
    "max_tokens": "integer",
    "temperature": "number",
    "top_p": "number",
    "n": "integer",
    "stop": "strings",
    "seed": "integer",
    "presence_penalty": "number",
    "frequency_penalty": "number",
    "logit_bias": "object",
    "response_format": "object",
    "top_k": "integer",
    "min_p": "number",
    "repetition_penalty": "number",
    "min_tokens": "integer",
    "stop_token_ids": "integers",
    "ignore_eos": "switch",
    "so_args": "object",
    "stream": "switch",
}
_CHAT_ONLY: dict[str, _Kind] = {
    "messages": "list",
    "max_completion_tokens": "integer",
    "logprobs": "switch",
    "top_logprobs": "integer",
    "tools": "list",
    "tool_choice": "any",
    "reasoning_effort": "any",
    "thinking": "switch",
}
_COMPLETIONS_ONLY: dict[str, _Kind] = {"prompt": "any", "logprobs": "integer"}
FIELDS: dict[Endpoint, dict[str, _Kind]] = {CHAT: _COMMON | _CHAT_ONLY, COMPLETIONS: _COMMON | _COMPLETIONS_ONLY}

# Body fields whose value goes into the field of `SamplingParams` of the same name, unchanged.
_SAME_NAME = (
    "temperature",
    "top_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "so_args",
)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS: dict[_Kind, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a string", lambda value: isinstance(value, str)),
    "integer": ("an integer", _is_integer),
    "number": ("a number", lambda value: isinstance(value, float) or _is_integer(value)),
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "strings": (
        "a string or a list of strings",
        lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)),
    ),
    "integers": ("a list of integers", lambda value: isinstance(value, list) and all(_is_integer(v) for v in value)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "any": ("any value", lambda _: True),
}


def check_fields(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """Return the fields of `body` that are set. Raises RequestError naming an unknown field or one of a wrong type."""
    fields = FIELDS[endpoint]
    present = {}
    for name, value in body.items():
        if name not in fields:
            raise _unknown(name, endpoint)
        if value is None:
            continue
        expected, is_good = _CHECKS[fields[name]]
        if not is_good(value):
            raise invalid_value(name, f"must be {expected}, not {shown(value)}")
        present[name] = value
    if present.get("stream"):
        raise invalid_value("stream", "must be false or left out: a batch file has no streams")
    return present


def sampling_params(present: Mapping[str, Any], endpoint: Endpoint) -> SamplingParams:
    """Return the sampling parameters of a checked body, with the endpoint's defaults."""
    settings: dict[str, Any] = {name: present[name] for name in _SAME_NAME if name in present}
    settings["max_tokens"] = _max_tokens(present, endpoint)
    settings["seq_seed"] = present.get("seed")
    stop = present.get("stop", [])
    settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    settings["stop_token_ids"] = tuple(present.get("stop_token_ids", ()))
    settings["logprobs"] = _num_logprobs(present) if endpoint == CHAT else present.get("logprobs")
    settings["logit_bias"] = _logit_bias(present["logit_bias"]) if present.get("logit_bias") else None
    return SamplingParams(**settings)


def body_field(name: str, present: Collection[str], endpoint: Endpoint) -> str:
    """Return the body field that set the field `name` of `SamplingParams`."""
    if name == "seq_seed":
        return "seed"
    if name == "logprobs" and endpoint == CHAT:
        return "top_logprobs"
    if name == "max_tokens" and "max_completion_tokens" in present:
        return "max_completion_tokens"
    return name


def _unknown(name: str, endpoint: Endpoint) -> RequestError:
    other = COMPLETIONS if endpoint == CHAT else CHAT
    if name in FIELDS[other]:
        return RequestError(f"{name} belongs to {other}, not to {endpoint}", code="unknown_field", param=name)
    close = difflib.get_close_matches(name, FIELDS[endpoint], n=1)
    hint = f"; did you mean {close[0]}?" if close else "; leave it out"
    return RequestError(f"{shown(name)} is no field of {endpoint}{hint}", code="unknown_field", param=name)


def _max_tokens(present: Mapping[str, Any], endpoint: Endpoint) -> int:
    old, new = present.get("max_tokens"), present.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise invalid_value("max_tokens", f"is {old} but max_completion_tokens is {new}; give one of them")
    given: int | None = new if new is not None else old
    if given is not None:
        return given
    if endpoint == COMPLETIONS:
        return DEFAULT_COMPLETION_TOKENS
    effort = present.get("reasoning_effort")
    if not present.get("thinking", True) or effort == "none":
        return DEFAULT_CHAT_TOKENS
    return DEFAULT_MAX_EFFORT_TOKENS if effort == "max" else DEFAULT_THINKING_TOKENS


def _num_logprobs(present: Mapping[str, Any]) -> int | None:
    if present.get("logprobs"):
        return int(present.get("top_logprobs", 0))
    if "top_logprobs" in present:
        raise invalid_value("top_logprobs", "needs logprobs: true")
    return None


def _logit_bias(bias: Mapping[str, Any]) -> dict[int, float]:
    checked = {}
    for token, value in bias.items():
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise invalid_value("logit_bias", f"must have token ids as keys, not {shown(token)}")
        if not isinstance(value, float) and not _is_integer(value):
            raise invalid_value("logit_bias", f"must have numbers as values, not {shown(value)} for token {token}")
        checked[int(token)] = value
    return checked
