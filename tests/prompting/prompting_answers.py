"""Answers as a model writes them (text, markup, token ids) and the parser run over them."""

from __future__ import annotations

import random
from typing import Any

from deepinfer.protocol import OutputFormat
from deepinfer.tokenizer import OutputParser, ParsedOutput, Tokenizer
from deepinfer.tokenizer.dsml import DSML

CONTROLS = ("<think>", "</think>", DSML)


def split_controls(text: str) -> list[str]:
    """The text cut at the literals of think and DSML tokens."""
    parts = [text]
    for control in CONTROLS:
        parts = [
            piece
            for part in parts
            for piece in ([part] if part in CONTROLS else _interleave(part.split(control), control))
        ]
    return [part for part in parts if part]


def _interleave(parts: list[str], separator: str) -> list[str]:
    return [piece for part in parts for piece in (separator, part)][1:]


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids as the model would write them: control literals are control tokens."""
    ids: list[int] = []
    for part in split_controls(text):
        control = tokenizer.control_id(part)
        ids += [control] if control is not None else tokenizer.encode_text(part)
    return ids


def cut_randomly(tokenizer: Tokenizer, text: str, generator: random.Random) -> list[int]:
    """Ids of the same text where ordinary text is cut into random pieces before it is encoded."""
    ids: list[int] = []
    for part in split_controls(text):
        control = tokenizer.control_id(part)
        if control is not None:
            ids.append(control)
            continue
        while part:
            size = generator.randint(1, 4)
            ids += tokenizer.encode_text(part[:size])
            part = part[size:]
    return ids


def read(
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    finish: str = "stop",
    thinking: bool = False,
    parse_tools: bool = False,
    kind: str = "chat",
    continues_prefix: bool = False,
    **options: Any,
) -> ParsedOutput:
    """Parse, and hold the rule that joined deltas are the final texts."""
    output_format = OutputFormat(
        kind=kind, in_reasoning=thinking, parse_tools=parse_tools, continues_prefix=continues_prefix
    )
    parser = OutputParser(tokenizer, output_format, **options)
    deltas = []
    for token in ids:
        deltas.append(parser.push(token))
        if deltas[-1].stopped:
            break
    result = parser.finish(finish)
    deltas.append(result.last_delta)
    assert "".join(delta.content for delta in deltas) == result.content
    assert "".join(delta.reasoning for delta in deltas) == result.reasoning
    joined = ["" for _ in result.tool_calls]
    for delta in deltas:
        for piece in delta.tool_calls:
            joined[piece.index] += piece.arguments
    assert joined == [call.arguments for call in result.tool_calls]
    return result


def block(*lines: str) -> str:
    return "\n".join([f"<{DSML} calls>", *lines, f"</{DSML} calls>"])


def invoke(name: str, *parameters: str) -> str:
    return "\n".join([f'<{DSML} invoke name="{name}">', *parameters, f"</{DSML} invoke>"])


def parameter(name: str, value: str, *, string: str | None = "true") -> str:
    mark = "" if string is None else f' string="{string}"'
    return f'<{DSML} parameter name="{name}"{mark}>{value}</{DSML} parameter>'
