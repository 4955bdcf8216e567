"""Tags of the tool call markup (DSML) out of a text that arrives in pieces.

Format, as the vendor's package `deepseek_recipe` 0.2 writes it, D being the control token `｜DSML｜`: a block
`<D calls>` .. `</D calls>`, in it one `<D invoke name="NAME">` .. `</D invoke>` a call, in that for each argument
`<D parameter name="KEY" string="true|false">VALUE</D parameter>`: raw text with string="true", else JSON. Tolerated
besides, as models write it: an invoke without its block, V4's spelling (`tool_calls`, no space behind D), a missing
`string`, self-closing tags. D enters as `MARK`, so a quotation of it in ordinary pieces never makes a tag.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

DSML = "｜DSML｜"
MARK = "\ud800"  # a lone surrogate: no decoded text holds one
MAX_TAG_CHARACTERS = 4096

_KINDS: dict[str, Literal["calls", "invoke", "parameter"]] = {
    "tool_calls": "calls",
    "calls": "calls",
    "invoke": "invoke",
    "parameter": "parameter",
}
_ANY_NAME = "|".join(_KINDS)
_BEGUN_NAME = "|".join(name[:size] for name in _KINDS for size in range(len(name) - 1, 0, -1))
_ATTRIBUTES = r'(?:[^">]|"[^"]*")*'
_TAG = re.compile(rf"<(/?){MARK} ?({_ANY_NAME})\b({_ATTRIBUTES})>")
_BEGUN_TAG = re.compile(rf'</?(?:{MARK} ?(?:(?:{_ANY_NAME})(?:\b{_ATTRIBUTES}(?:"[^"]*)?)?|{_BEGUN_NAME})?)?')
_CUT_PARAMETER = re.compile(rf"<{MARK} ?parameter\b(.*)", re.DOTALL)
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')


def plain(text: str) -> str:
    """`text` with the control token written out."""
    return text.replace(MARK, DSML)


class Tag(msgspec.Struct, frozen=True):
    """A whole tag; `text` is how it was written."""

    kind: Literal["calls", "invoke", "parameter"]
    closes: bool
    self_closes: bool
    attributes: dict[str, str]
    text: str


class TagLexer:
    """Cuts a text into tags and the text between them, holding back what may be the beginning of a tag."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[str | Tag]:
        """Tags and texts that are certain now. A tag longer than `MAX_TAG_CHARACTERS` is text."""
        parts: list[str | Tag] = []
        rest = self._held + text
        self._held = ""
        while rest:
            begin = rest.find("<")
            if begin != 0:
                parts.append(rest if begin < 0 else rest[:begin])
                rest = "" if begin < 0 else rest[begin:]
                continue
            match = _TAG.match(rest)
            if match is not None:
                parts.append(_tag(match))
                rest = rest[match.end() :]
            elif len(rest) <= MAX_TAG_CHARACTERS and _BEGUN_TAG.fullmatch(rest):
                self._held, rest = rest, ""
            else:
                parts.append("<")
                rest = rest[1:]
        return parts

    def flush(self) -> str:
        """What was held back: no more text will come."""
        held, self._held = self._held, ""
        return held


def _tag(match: re.Match[str]) -> Tag:
    closing, name, attributes = match.groups()
    return Tag(
        kind=_KINDS[name],
        closes=bool(closing),
        self_closes=attributes.rstrip().endswith("/"),
        attributes=_attributes(attributes),
        text=match.group(),
    )


def _attributes(text: str) -> dict[str, str]:
    return {key: plain(value) for key, value in _ATTRIBUTE.findall(text)}


def cut_tag_parameter(text: str) -> str | None:
    """The name in an opening parameter tag that was cut behind it, else None."""
    match = _CUT_PARAMETER.match(text)
    return None if match is None else _attributes(match.group(1)).get("name")
