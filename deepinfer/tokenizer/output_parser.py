"""Reads generated tokens: reasoning, content and tool calls, and where a stop string ends the answer.

A rank uses it to find the token at which a stop string completes, a client to build the text; both see the same.
Where an answer begins follows from its prompt. Reasoning ends at the token `</think>`, not at such a text, or where
calls begin; calls are read only where tools were declared; stop strings count in content only.
"""

from __future__ import annotations

import enum

import msgspec

from deepinfer.protocol import OutputFormat
from deepinfer.tokenizer.calls import CallPiece, CallReader
from deepinfer.tokenizer.chat import THINK_CLOSE, THINK_OPEN
from deepinfer.tokenizer.detokenizer import IncrementalDetokenizer
from deepinfer.tokenizer.dsml import DSML, MARK, Tag, TagLexer, plain
from deepinfer.tokenizer.stop_matcher import StopMatcher
from deepinfer.tokenizer.tools import ToolSchema
from deepinfer.tokenizer.vocabulary import Tokenizer


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALLS = enum.auto()


class _NewlineHolder:
    """Holds the newlines at the end of a text, which may turn out to be none of it; their number is enough."""

    def __init__(self) -> None:
        self._num_held = 0

    def push(self, text: str) -> str:
        """The text up to its final newlines."""
        body = text.rstrip("\n")
        shown = "\n" * self._num_held + body if body else ""
        self._num_held = len(text) - len(body) + (0 if body else self._num_held)
        return shown

    def release(self) -> str:
        """The held newlines, to be shown or forgotten."""
        newlines = "\n" * self._num_held
        self._num_held = 0
        return newlines


class OutputDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became certain since the last delta. `stopped`: a stop string has ended the answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[CallPiece, ...] = ()
    stopped: bool = False


class ParsedCall(msgspec.Struct, frozen=True):
    """One tool call. `arguments` is JSON text unless the model wrote invalid JSON or was cut inside the call."""

    name: str
    arguments: str


class ParsedOutput(msgspec.Struct, frozen=True):
    """A whole answer: the joined deltas, `last_delta` (what `finish` released) included.

    `num_reasoning_tokens` counts the tokens up to and with the end of the reasoning.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ParsedCall, ...]
    finish_reason: str
    num_reasoning_tokens: int
    last_delta: OutputDelta


class OutputParser:
    """One sequence. `push` every generated token but one that ended it by its id (EOS or a stop token), then `finish`.

    `tools` are the declared ones (`EncodedChat.tools`); a rank needs none. Joined deltas do not depend on how tokens
    cut the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        output_format: OutputFormat,
        *,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        tools: tuple[ToolSchema, ...] | None = None,
    ) -> None:
        is_chat = output_format.kind == "chat"
        continues_prefix = output_format.continues_prefix
        self._state = _State.REASONING if is_chat and output_format.in_reasoning else _State.CONTENT
        self._think_open = tokenizer.control_id(THINK_OPEN) if is_chat else None
        self._think_close = tokenizer.control_id(THINK_CLOSE) if is_chat else None
        self._parses_tools = is_chat and output_format.parse_tools
        self._mark = tokenizer.control_id(DSML) if self._parses_tools else None
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._lexer = TagLexer()
        self._calls = CallReader(tools or ())
        self._strips_reasoning = is_chat and not continues_prefix
        self._strips_content = is_chat and not (continues_prefix and self._state is _State.CONTENT)
        self._reasoning_newlines = _NewlineHolder()
        self._content_newlines = _NewlineHolder()
        self._stop = StopMatcher(stop, include_stop=include_stop_str_in_output)
        self._num_reasoning_tokens = 0
        self._new_reasoning: list[str] = []
        self._new_content: list[str] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._pieces: list[CallPiece] = []

    def push(self, token_id: int) -> OutputDelta:
        """The next token. Tokens behind a stop string are ignored."""
        if self._stop.stopped:
            return OutputDelta(stopped=True)
        self._num_reasoning_tokens += self._state is _State.REASONING
        if token_id in (self._think_open, self._think_close):
            self._read(self._detokenizer.flush())
            self._read_think_token(closes=token_id == self._think_close)
        elif token_id == self._mark:
            self._read(self._detokenizer.flush() + MARK)
        else:
            self._read(self._detokenizer.push((token_id,)))
        return self._take_delta()

    def finish(self, finish_reason: str) -> ParsedOutput:
        """The answer is at its end; call once. `finish_reason` "stop" becomes "tool_calls" if there are calls.

        After any other reason than "stop" open calls stay open. A tag that was cut is never shown. A stop string always
        gives "stop".
        """
        if not self._stop.stopped:
            self._read(self._detokenizer.flush())
            self._finish_text(ended=finish_reason == "stop")
        delta = self._take_delta()
        if delta.stopped:
            finish_reason = "stop"
        if finish_reason == "stop" and self._calls.num_calls:
            finish_reason = "tool_calls"
        return ParsedOutput(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=self._joined_calls(),
            finish_reason=finish_reason,
            num_reasoning_tokens=self._num_reasoning_tokens,
            last_delta=delta,
        )

    def _read(self, text: str) -> None:
        if not self._parses_tools:
            self._read_text(text)
            return
        for part in self._lexer.push(text):
            if self._stop.stopped:
                return
            if isinstance(part, Tag):
                self._read_tag(part)
            else:
                self._read_text(part)

    def _read_text(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.REASONING:
            self._add_reasoning(plain(text))
        elif self._state is _State.CONTENT:
            self._add_content(plain(text))
        else:
            self._calls.text(text)

    def _read_tag(self, tag: Tag) -> None:
        if self._state is _State.CALLS:
            if not self._calls.closed:
                self._calls.tag(tag)
        elif not tag.closes and (tag.kind == "calls" or (tag.kind == "invoke" and tag.attributes.get("name"))):
            self._end_text_before_calls()
            self._state = _State.CALLS
            self._calls.tag(tag)
        else:
            self._read_text(tag.text)

    def _read_think_token(self, *, closes: bool) -> None:
        """Ends the reasoning if it closes; elsewhere it is dropped, but for a quotation inside an argument."""
        if self._parses_tools:
            self._read_text(self._lexer.flush())
        if self._state is _State.REASONING and closes:
            self._reasoning_newlines.release()
            self._state = _State.CONTENT
        elif self._state is _State.CALLS and self._calls.in_value:
            self._read_text(THINK_CLOSE if closes else THINK_OPEN)

    def _add_reasoning(self, text: str) -> None:
        if self._strips_reasoning:
            text = text.lstrip("\n")
            self._strips_reasoning = not text
        self._new_reasoning.append(self._reasoning_newlines.push(text))

    def _add_content(self, text: str) -> None:
        if self._strips_content:
            text = text.lstrip("\n")
            self._strips_content = not text
        self._show_content(self._stop.push(text))
        if self._stop.stopped:
            self._new_content.append(self._content_newlines.release())

    def _show_content(self, text: str) -> None:
        self._new_content.append(self._content_newlines.push(text) if self._parses_tools else text)

    def _end_text_before_calls(self) -> None:
        """Newlines before the calls belong to the markup."""
        self._show_content(self._stop.flush())
        self._reasoning_newlines.release()
        self._content_newlines.release()

    def _finish_text(self, *, ended: bool) -> None:
        held = self._lexer.flush()
        if MARK not in held:
            self._read_text(held)
        if self._state is _State.CALLS:
            if ended:
                self._calls.complete()
            else:
                self._calls.cut(held)
            return
        if MARK in held:
            self._end_text_before_calls()
        self._new_reasoning.append(self._reasoning_newlines.release())
        self._show_content(self._stop.flush())
        self._new_content.append(self._content_newlines.release())

    def _take_delta(self) -> OutputDelta:
        reasoning, content = "".join(self._new_reasoning), "".join(self._new_content)
        self._new_reasoning.clear()
        self._new_content.clear()
        self._reasoning.append(reasoning)
        self._content.append(content)
        pieces = self._calls.take_pieces()
        self._pieces += pieces
        return OutputDelta(reasoning, content, pieces, self._stop.stopped)

    def _joined_calls(self) -> tuple[ParsedCall, ...]:
        names = [piece.name for piece in self._pieces if piece.name is not None]
        arguments: list[list[str]] = [[] for _ in names]
        for piece in self._pieces:
            arguments[piece.index].append(piece.arguments)
        return tuple(ParsedCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True))
