"""Tool calls out of DSML tags: JSON arguments, written piece by piece as the markup comes.

The markup, and what is tolerated beyond it, is that of `dsml`.
"""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from deepinfer.tokenizer.dsml import Tag, cut_tag_parameter, plain
from deepinfer.tokenizer.tools import ToolSchema

_WRAPPERS = ("arguments", "input")


class CallPiece(msgspec.Struct, frozen=True):
    """Part of call number `index`. The first piece has the name; all `arguments` joined are the call's arguments."""

    index: int
    name: str | None
    arguments: str


class _Parameter(msgspec.Struct):
    """The parameter being read. Only values of the forms "string" and "json" are written as they come."""

    key: str
    form: Literal["string", "json", "unmarked", "wrapper"]
    value: list[str]


class CallReader:
    """Reads the tags and texts of one answer's calls.

    A value marked `string="false"` passes as it is, so arguments are JSON only as far as the model wrote JSON; one that
    the schema declares a string is text all the same. An unmarked value is JSON if it parses, else text. A parameter
    `arguments` or `input` that the tool does not declare is unwrapped when it stands alone and holds an object.
    Without the schema of a tool nothing is unwrapped. `closed` is set once the block has ended.
    """

    def __init__(self, tools: tuple[ToolSchema, ...]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._tool: ToolSchema | None = None
        self._pieces: list[CallPiece] = []
        self._in_call = False
        self._parameter: _Parameter | None = None
        self._wrapped: tuple[str, str] | None = None
        self._num_parameters = 0
        self.num_calls = 0
        self.closed = False

    @property
    def in_value(self) -> bool:
        """Whether text that comes now is part of an argument."""
        return self._parameter is not None

    def text(self, text: str) -> None:
        """Text between tags: part of a value, or dropped."""
        parameter = self._parameter
        if parameter is None:
            return
        if parameter.form in ("string", "json"):
            self._write(_escape(text) if parameter.form == "string" else plain(text))
        else:
            parameter.value.append(plain(text))

    def tag(self, tag: Tag) -> None:
        """The next tag. Where a closing tag is missing, the tag that should have come behind it closes too."""
        if tag.kind == "calls" and not tag.closes and self.in_value:
            self.text(tag.text)
            return
        if self._parameter is not None:
            self._end_parameter(self._parameter)
        name = tag.attributes.get("name")
        if tag.kind == "parameter":
            if self._in_call and name and not tag.closes:
                self._begin_parameter(name, tag)
            return
        self._end_call()
        if tag.kind == "calls":
            self.closed = tag.closes
        elif name and not tag.closes:
            self._begin_call(name)
            if tag.self_closes:
                self._end_call()

    def complete(self) -> None:
        """The answer ended by itself: close what is open, so that its arguments are whole."""
        if self._parameter is not None:
            self._end_parameter(self._parameter)
        self._end_call()

    def cut(self, begun_tag: str) -> None:
        """The answer was cut: what is open stays open, and what was held back is written.

        Of a tag that was cut too, a parameter's name is written if it was whole.
        """
        parameter = self._parameter
        if parameter is not None and parameter.form in ("unmarked", "wrapper"):
            self._write_key(parameter.key)
            self._write("".join(parameter.value))
        elif self._wrapped is not None:
            self._write(self._wrapped[1])
        elif parameter is None and self._in_call:
            key = cut_tag_parameter(begun_tag)
            if key:
                self._write_key(key)

    def take_pieces(self) -> tuple[CallPiece, ...]:
        """The pieces since the last call of this method."""
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    def _begin_call(self, name: str) -> None:
        self._tool = self._tools.get(name)
        self._in_call = True
        self._num_parameters = 0
        self._pieces.append(CallPiece(self.num_calls, name, ""))
        self.num_calls += 1

    def _end_call(self) -> None:
        if not self._in_call:
            return
        if self._wrapped is not None:
            self._write(self._wrapped[1])
            self._wrapped = None
        else:
            self._write("}" if self._num_parameters else "{}")
        self._in_call = False

    def _begin_parameter(self, key: str, tag: Tag) -> None:
        if self._wrapped is not None:
            self._write_key(self._wrapped[0])
            self._write(self._wrapped[1])
            self._wrapped = None
        parameter = _Parameter(key, self._form(key, tag.attributes.get("string")), [])
        self._parameter = parameter
        if parameter.form in ("string", "json"):
            self._write_key(key)
            self._write('"' if parameter.form == "string" else "")
        if tag.self_closes:
            self._end_parameter(parameter)

    def _form(self, key: str, marked: str | None) -> Literal["string", "json", "unmarked", "wrapper"]:
        if marked == "true":
            return "string"
        if self._tool is not None:
            if self._tool.is_string(key):
                return "string"
            if key in _WRAPPERS and not self._num_parameters and not self._tool.declares(key):
                return "wrapper"
        return "json" if marked == "false" else "unmarked"

    def _end_parameter(self, parameter: _Parameter) -> None:
        self._parameter = None
        if parameter.form in ("string", "json"):
            self._write('"' if parameter.form == "string" else "")
            return
        value = "".join(parameter.value)
        is_json, is_object = _json_kind(value)
        if parameter.form == "wrapper" and is_object:
            self._wrapped = (parameter.key, value)
            return
        self._write_key(parameter.key)
        self._write(value if is_json else f'"{_escape(value)}"')

    def _write_key(self, key: str) -> None:
        self._write(f'{", " if self._num_parameters else "{"}"{_escape(key)}": ')
        self._num_parameters += 1

    def _write(self, text: str) -> None:
        if text:
            self._pieces.append(CallPiece(self.num_calls - 1, None, text))


def _escape(text: str) -> str:
    """Inside of a JSON string; escapes of a joined text are the joined escapes."""
    return json.dumps(plain(text), ensure_ascii=False)[1:-1]


def _json_kind(text: str) -> tuple[bool, bool]:
    """(is JSON, is a JSON object)."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False, False
    return True, isinstance(value, dict)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
