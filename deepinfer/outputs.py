"""What goes into `LLM.run_rows` and what comes out of every door: plain dataclasses without torch or Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer.errors import RequestError
from deepinfer.protocol import SamplingParams

ReasonName = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(slots=True, frozen=True)
class ChatOptions:
    """How `messages` become a prompt; the fields are those of the chat endpoint with the same names."""

    thinking: bool = True
    reasoning_effort: str | int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


@dataclass(slots=True, frozen=True)
class Row:
    """One request of a run. Exactly one of `prompt` (text or token ids) and `messages` is set.

    `tag` is the caller's own number and comes back with the result; it need not be unique. A text prompt gets BOS in
    front, token ids are taken as they are. `chat` says how `messages` are read; only its `response_format` holds for a
    prompt too. `label` is the caller's name of the row, for log lines.
    """

    tag: int
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    chat: ChatOptions = ChatOptions()
    params: SamplingParams = field(default_factory=SamplingParams)
    label: str = ""


@dataclass(slots=True, frozen=True)
class ToolCall:
    """One call the model made: `arguments` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a request.

    `token_ids` hold everything generated, the stop token included; `text` is the content alone (without reasoning and
    tool calls), cut before a stop string. `logprobs[t]` maps token ids to log-probabilities for token t: the chosen
    token first, then the most likely by descending value. `finish_reason` None: cut off by an error.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: ReasonName | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The answer to one request. With `error` set there is no other result, and `outputs` is empty.

    `prompt_logprobs[i]` is None for i = 0, else a dict like those of `CompletionOutput.logprobs`. `seed` is the one
    that was used, drawn by the engine when the request named none. `tag` is that of the row in `LLM.generate_iter`.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    seed: int | None = None
    error: RequestError | None = None
    finished: bool = True
    tag: Any = None


@dataclass(slots=True)
class RowResult:
    """A row's answer: `seconds` from submission to the last token; ranks are -1 when none took part."""

    tag: int
    output: RequestOutput
    seconds: float = 0.0
    prefill_rank: int = -1
    decode_rank: int = -1
