"""Chat requests to prompt tokens, in the format of DeepSeek-V4.1.

The layout comes from the vendor's package `deepseek_recipe` (0.2, MIT). It has no integer efforts, no way to keep
earlier reasoning without tools, and no task tokens; these three are added here.
"""

from __future__ import annotations

from collections.abc import Sequence

import deepseek_recipe as recipe
import msgspec

from deepinfer.errors import RequestError, shown
from deepinfer.protocol import OutputFormat
from deepinfer.tokenizer.messages import TASK_TOKENS, ChatMessage, parse_messages
from deepinfer.tokenizer.response_format import parse_response_format
from deepinfer.tokenizer.tools import ToolSchema, invalid, parse_tools
from deepinfer.tokenizer.vocabulary import Tokenizer

ASSISTANT = "<｜Assistant｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_EFFORTS = ("low", "high", "xhigh", "max")
_DEFAULT_EFFORT = "high"
_DEFAULT_EFFORT_NUMBER = "75"
_KEEPS_REASONING = recipe.ToolDefinition("placeholder", "", {})


class Segment(msgspec.Struct, frozen=True):
    """A piece of a prompt: one control token, or plain text in which literals of control tokens stay text."""

    text: str
    is_control: bool


class EncodedChat(msgspec.Struct, frozen=True):
    """A chat as a prompt. `output_format` and `tools` are what `OutputParser` needs to read the answer.

    One of `forced_tools` has to be called, unless there are none; nothing here makes the model do so.
    """

    token_ids: list[int]
    output_format: OutputFormat
    text: str
    tools: tuple[ToolSchema, ...]
    forced_tools: tuple[ToolSchema, ...] = ()


def encode_chat(
    tokenizer: Tokenizer,
    messages: object,
    *,
    thinking: object = True,
    reasoning_effort: object = None,
    tools: object = None,
    tool_choice: object = None,
    response_format: object = None,
    drop_thinking: bool = True,
) -> EncodedChat:
    """The prompt of a chat request whose fields have their OpenAI form; each is checked here.

    `reasoning_effort`: "low" (50), "high" (75, the default), "xhigh" (75), "max" (100), an integer 1 to 100, or
    "none", which turns thinking off; without thinking it has no effect. `drop_thinking` removes reasoning before the
    last user turn if no tools are declared. `response_format` only adds the hint to the prompt; it enforces nothing.
    Raises `RequestError` with `param` at the wrong field.
    """
    history = parse_messages(messages)
    parsed_tools = parse_tools(tools)
    effort = _check_effort(reasoning_effort)
    if not isinstance(thinking, bool):
        raise invalid("thinking", f"is {shown(thinking)}; use true or false")
    thinking = thinking and effort != "none"
    forced = _forced_tools(tool_choice, parsed_tools)
    uses_tools = tool_choice != "none" and bool(parsed_tools)
    declared = parsed_tools if uses_tools else ()
    if history[-1].task is not None and thinking:
        raise invalid(f"messages[{len(history) - 1}].task", "needs thinking switched off")
    wanted = parse_response_format(response_format)
    segments = _render(
        history,
        thinking=thinking,
        effort=effort,
        tools=declared,
        schema=None if wanted is None else wanted.shown_schema,
        keep_reasoning=thinking and not drop_thinking,
    )
    in_reasoning = _ends_in_reasoning(segments)
    return EncodedChat(
        token_ids=encode_segments(tokenizer, segments),
        output_format=OutputFormat(
            kind="chat",
            in_reasoning=in_reasoning,
            parse_tools=uses_tools,
            continues_prefix=history[-1].prefix and bool(history[-1].content or history[-1].reasoning),
        ),
        text="".join(segment.text for segment in segments),
        tools=declared,
        forced_tools=forced,
    )


def encode_segments(tokenizer: Tokenizer, segments: Sequence[Segment]) -> list[int]:
    """Ids of the segments. Raises `RequestError` that names a control token which the vocabulary lacks."""
    ids: list[int] = []
    for segment in segments:
        if not segment.is_control:
            ids += tokenizer.encode_text(segment.text)
            continue
        token_id = tokenizer.control_id(segment.text)
        if token_id is None:
            raise RequestError(
                f"chat needs the token {segment.text}, which this checkpoint's tokenizer lacks; "
                "send a plain prompt to /v1/completions",
                code="not_available",
                param="messages",
            )
        ids.append(token_id)
    return ids


def _check_effort(effort: object) -> str | int:
    if effort is None:
        return _DEFAULT_EFFORT
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    if isinstance(effort, str) and effort in (*_EFFORTS, "none"):
        return effort
    raise invalid("reasoning_effort", f"is {shown(effort)}; use {', '.join(_EFFORTS)}, none or an integer 1 to 100")


def _forced_tools(choice: object, tools: tuple[ToolSchema, ...]) -> tuple[ToolSchema, ...]:
    """The tools of which one has to be called; none if the model may choose or has no choice."""
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice == "required":
        if not tools:
            raise invalid("tool_choice", "is 'required' but no tools are declared")
        return tools
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        known = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise invalid("tool_choice", f"is {shown(choice)}; use {known}")
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        raise invalid("tool_choice.function.name", f"is {shown(name)}, which is no declared tool")
    return named


def _render(
    history: Sequence[ChatMessage],
    *,
    thinking: bool,
    effort: str | int,
    tools: Sequence[ToolSchema],
    schema: object,
    keep_reasoning: bool,
) -> list[Segment]:
    placeholder = keep_reasoning and not tools
    try:
        definitions = [recipe.ToolDefinition(tool.name, tool.description, tool.parameters) for tool in tools]
        conversation = recipe.Conversation(
            [_vendor_message(message) for message in history],
            thinking_mode=thinking,
            tools=[_KEEPS_REASONING] if placeholder else definitions or None,
            reasoning_effort=effort if effort in _EFFORTS else _DEFAULT_EFFORT,
            response_schema=schema,
        )
        rendered = recipe.DeepseekV41Encoding().render_conversation(conversation)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"messages: the chat can't be rendered ({error})", param="messages") from error
    prompt, ranges = rendered.prompt, rendered.special_ranges
    if placeholder:
        prompt, ranges = _without_placeholder(prompt, ranges, history[0])
    segments = _split(prompt, ranges)
    if thinking and isinstance(effort, int):
        segments[2] = _with_effort(segments[2], effort)
    return _with_task(segments, history[-1].task)


def _vendor_message(message: ChatMessage) -> recipe.Message:
    if message.role == "system":
        return recipe.SystemMessage(message.content)
    if message.role == "user":
        return recipe.UserMessage(message.content)
    if message.role == "tool":
        return recipe.ToolMessage(message.content, message.tool_call_id)
    if message.role == "latest_reminder":
        return recipe.LatestReminderMessage(message.content)
    calls = [recipe.ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
    return recipe.AssistantMessage(message.content, message.reasoning, calls or None, message.prefix)


def _without_placeholder(
    prompt: str, ranges: Sequence[tuple[int, int]], first: ChatMessage
) -> tuple[str, list[tuple[int, int]]]:
    """The prompt without the tools section of `_KEEPS_REASONING`, which made the package keep earlier reasoning."""
    alone = recipe.Conversation([recipe.UserMessage("")], thinking_mode=False, tools=[_KEEPS_REASONING])
    rendered = recipe.DeepseekV41Encoding().render_conversation(alone)
    section = rendered.prompt[rendered.special_ranges[1][1] : rendered.special_ranges[-3][0]]
    begin = prompt.index(section, len(first.content) if first.role == "system" else 0)
    end = begin + len(section)
    before = [span for span in ranges if span[1] <= begin]
    behind = [(start - len(section), stop - len(section)) for start, stop in ranges if start >= end]
    return prompt[:begin] + prompt[end:], before + behind


def _split(prompt: str, ranges: Sequence[tuple[int, int]]) -> list[Segment]:
    segments: list[Segment] = []
    position = 0
    for start, end in [*ranges, (len(prompt), len(prompt))]:
        if start > position:
            segments.append(Segment(prompt[position:start], is_control=False))
        if end > start:
            segments.append(Segment(prompt[start:end], is_control=True))
        position = end
    return segments


def _with_effort(effort_line: Segment, effort: int) -> Segment:
    head, number, tail = effort_line.text.partition(_DEFAULT_EFFORT_NUMBER)
    assert number, effort_line
    return Segment(f"{head}{effort}{tail}", is_control=False)


def _with_task(segments: list[Segment], task: str | None) -> list[Segment]:
    """A task token takes the place of the answer's header; only `action` stands behind it."""
    if task is None:
        return segments
    header = segments if task == "action" else segments[:-2]
    return [*header, Segment(TASK_TOKENS[task], is_control=True)]


def _ends_in_reasoning(segments: Sequence[Segment]) -> bool:
    """Whether the last think token of the answer's header opens."""
    for segment in reversed(segments):
        if segment.is_control and segment.text in (THINK_OPEN, THINK_CLOSE, ASSISTANT):
            return segment.text == THINK_OPEN
    return False
