"""Reading of answers: golden cases, every cut of the text into tokens, tolerance, stop strings, token counts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from prompting_answers import block, cut_randomly, invoke, parameter, read, tokens_of

from deepinfer.protocol import OutputFormat
from deepinfer.tokenizer import OutputParser, ParsedOutput, Tokenizer, ToolSchema, parse_tools
from deepinfer.tokenizer.dsml import DSML, MAX_TAG_CHARACTERS

CASES = json.loads((Path(__file__).parents[1] / "golden" / "prompting.json").read_text())["parse"]
TOOLS = parse_tools(
    [
        {
            "function": {
                "name": "search",
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
                },
            }
        }
    ]
)


def as_golden(result: ParsedOutput) -> dict[str, Any]:
    return {
        "reasoning": result.reasoning,
        "content": result.content,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in result.tool_calls],
        "finish_reason": result.finish_reason,
    }


def read_case(tokenizer: Tokenizer, case: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    given = case["input"]
    result = read(
        tokenizer,
        ids,
        finish=given["backend_finish"],
        thinking=given["thinking"],
        parse_tools=given["tools_declared"],
        stop=tuple(given["stop"] or ()),
    )
    return as_golden(result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_case(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert read_case(tokenizer, case, tokens_of(tokenizer, case["input"]["text"])) == case["expected"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_case_with_any_tokens(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    for seed in range(30):
        ids = cut_randomly(tokenizer, case["input"]["text"], random.Random(seed))
        assert read_case(tokenizer, case, ids) == case["expected"]


def calls_of(
    tokenizer: Tokenizer, text: str, *, tools: tuple[ToolSchema, ...] | None = None, finish: str = "stop"
) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls), the same for the text's own tokens and for its characters."""
    results = []
    for ids in (tokens_of(tokenizer, text), cut_randomly(tokenizer, text, random.Random(1))):
        result = read(tokenizer, ids, parse_tools=True, tools=tools, finish=finish)
        results.append((result.content, [(call.name, call.arguments) for call in result.tool_calls]))
    assert results[0] == results[1]
    return results[0]


PLAIN = invoke("search", parameter("query", "a"))
PLAIN_CALL = ("search", '{"query": "a"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        pytest.param(f"x\n\n{PLAIN}", "x", [PLAIN_CALL], id="bare_invoke"),
        pytest.param(block(PLAIN).replace(f"{DSML} calls", f"{DSML}tool_calls"), "", [PLAIN_CALL], id="v4_block"),
        pytest.param(block(PLAIN).replace(f"{DSML} ", DSML), "", [PLAIN_CALL], id="no_space"),
        pytest.param(block(f'<{DSML} invoke name="search"/>'), "", [("search", "{}")], id="self_closing_invoke"),
        pytest.param(
            block(invoke("search", f'<{DSML} parameter name="query" string="true"/>')),
            "",
            [("search", '{"query": ""}')],
            id="self_closing_parameter",
        ),
        pytest.param(
            block(invoke("f", parameter("n", "[1, 2]", string=None), parameter("t", "a [", string=None))),
            "",
            [("f", '{"n": [1, 2], "t": "a ["}')],
            id="no_string_attribute",
        ),
        pytest.param(
            block(invoke("f", f'<{DSML} parameter string="true" name="k">v</{DSML} parameter>')),
            "",
            [("f", '{"k": "v"}')],
            id="attributes_swapped",
        ),
        pytest.param(
            block(invoke("f", f'<{DSML} parameter name="k" string="true">v')),
            "",
            [("f", '{"k": "v\\n"}')],
            id="open_value",
        ),
        pytest.param(
            f'<{DSML} calls><{DSML} invoke name="f"><{DSML} parameter name="k" string="true">v',
            "",
            [("f", '{"k": "v"}')],
            id="nothing_closed",
        ),
        pytest.param(
            f'<{DSML} calls><{DSML} invoke name="f"><{DSML} invoke name="g"></{DSML} invoke></{DSML} calls>',
            "",
            [("f", "{}"), ("g", "{}")],
            id="invoke_not_closed",
        ),
        pytest.param(
            block(f"<{DSML} invoke>", parameter("query", "a"), f"</{DSML} invoke>"), "", [], id="call_without_a_name"
        ),
        pytest.param(f'x\n\n<{DSML} calls>\n<{DSML} invoke name="sea', "x", [], id="name_cut"),
        pytest.param(f"x\n\n<{DSML} cal", "x", [], id="block_cut"),
        pytest.param("x\n\n<", "x\n\n<", [], id="only_a_less_sign"),
        pytest.param(f"a <{DSML} b> {DSML} c", f"a <{DSML} b> {DSML} c", [], id="unknown_tag_is_text"),
        pytest.param(f"a </{DSML} calls> b", f"a </{DSML} calls> b", [], id="closing_tag_is_text"),
        pytest.param(f"{block(PLAIN)}\n\n{block(PLAIN)}end", "", [PLAIN_CALL], id="behind_the_block"),
        pytest.param(f"x\n\n\n{block(PLAIN)}</think>", "x", [PLAIN_CALL], id="think_end_behind_the_block"),
        pytest.param(
            block(invoke("f", parameter("k", f"</think> <b> </{DSML} x> <{DSML} calls>"))),
            "",
            [("f", json.dumps({"k": f"</think> <b> </{DSML} x> <{DSML} calls>"}, ensure_ascii=False))],
            id="quotations_in_a_value",
        ),
    ],
)
def test_tolerance(tokenizer: Tokenizer, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert calls_of(tokenizer, text) == (content, calls)


def test_declared_string_keeps_its_text(tokenizer: Tokenizer) -> None:
    text = block(invoke("search", parameter("query", "12", string="false"), parameter("limit", "3", string="false")))
    assert calls_of(tokenizer, text, tools=TOOLS) == ("", [("search", '{"query": "12", "limit": 3}')])
    assert calls_of(tokenizer, text) == ("", [("search", '{"query": 12, "limit": 3}')])


def test_lone_wrapper_is_unwrapped(tokenizer: Tokenizer) -> None:
    wrapped = parameter("arguments", '{"query": "a"}', string="false")
    assert calls_of(tokenizer, block(invoke("search", wrapped)), tools=TOOLS) == ("", [PLAIN_CALL])
    both = block(invoke("search", wrapped, parameter("limit", "1", string="false")))
    assert calls_of(tokenizer, both, tools=TOOLS) == (
        "",
        [("search", '{"arguments": {"query": "a"}, "limit": 1}')],
    )
    text = block(invoke("search", parameter("input", "words", string=None)))
    assert calls_of(tokenizer, text, tools=TOOLS) == ("", [("search", '{"input": "words"}')])


def test_wrapper_beside_other_arguments_is_an_argument(tokenizer: Tokenizer) -> None:
    wrapped = parameter("input", '{"a": 1}', string="false")
    text = block(invoke("search", parameter("query", "a"), wrapped))
    assert calls_of(tokenizer, text, tools=TOOLS) == ("", [("search", '{"query": "a", "input": {"a": 1}}')])
    alone = f'<{DSML} calls><{DSML} invoke name="search">{wrapped}'
    assert calls_of(tokenizer, alone, tools=TOOLS, finish="length") == ("", [("search", '{"a": 1}')])


def test_unmarked_value_that_only_python_reads_is_text(tokenizer: Tokenizer) -> None:
    text = block(invoke("f", parameter("x", "NaN", string=None)))
    assert calls_of(tokenizer, text) == ("", [("f", '{"x": "NaN"}')])


def test_endless_tag_is_text(tokenizer: Tokenizer) -> None:
    text = f'x <{DSML} invoke name="{"a" * MAX_TAG_CHARACTERS}'
    assert calls_of(tokenizer, text) == (text, [])


def test_cut_calls_stay_open(tokenizer: Tokenizer) -> None:
    whole = f'<{DSML} calls>\n<{DSML} invoke name="search">\n<{DSML} parameter name="query" string="true">a'
    assert calls_of(tokenizer, whole, finish="length") == ("", [("search", '{"query": "a')])
    assert calls_of(tokenizer, f"{whole}<", finish="length") == ("", [("search", '{"query": "a<')])
    begun = whole.removesuffix(' string="true">a')
    assert calls_of(tokenizer, begun, finish="length") == ("", [("search", '{"query": ')])
    unmarked = whole.replace(' string="true"', "")
    assert calls_of(tokenizer, unmarked, finish="length") == ("", [("search", '{"query": a')])


def test_markup_quoted_in_ordinary_tokens_is_text(tokenizer: Tokenizer) -> None:
    """The parser goes by token ids: quoted control tokens are no control tokens."""
    text = f"</think>{block(PLAIN)}"
    result = read(tokenizer, tokenizer.encode_text(text), thinking=True, parse_tools=True)
    assert (result.reasoning, result.content, result.tool_calls) == (text, "", ())


def test_reasoning_cut_by_length(tokenizer: Tokenizer) -> None:
    """P27: Only reasoning, no closing tag: content is an empty string, the count covers all tokens."""
    ids = tokens_of(tokenizer, "\n\nI think that\n")
    result = read(tokenizer, ids, thinking=True, finish="length")
    assert (result.reasoning, result.content, result.finish_reason) == ("I think that\n", "", "length")
    assert result.num_reasoning_tokens == len(ids)


def test_reasoning_tokens_end_with_the_closing_tag(tokenizer: Tokenizer) -> None:
    reasoning = tokens_of(tokenizer, "some words\n</think>")
    result = read(tokenizer, reasoning + tokens_of(tokenizer, "\n\nAnswer</think> on <think>it"), thinking=True)
    assert (result.reasoning, result.content) == ("some words", "Answer on it")
    assert result.num_reasoning_tokens == len(reasoning)
    assert read(tokenizer, tokens_of(tokenizer, "Answer")).num_reasoning_tokens == 0


def test_continued_prefix_keeps_its_newlines(tokenizer: Tokenizer) -> None:
    ids = tokens_of(tokenizer, "\n\nand on")
    assert read(tokenizer, ids, continues_prefix=True).content == "\n\nand on"
    assert read(tokenizer, ids).content == "and on"
    ids = tokens_of(tokenizer, "\nmore\n</think>\n\nAnswer")
    result = read(tokenizer, ids, thinking=True, continues_prefix=True)
    assert (result.reasoning, result.content) == ("\nmore", "Answer")


@pytest.mark.parametrize("parse_tools", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("abc END def", ("END",), "abc "),
        ("abcdef", ("cdef", "de"), "abc"),
        ("one END", ("ND", "END"), "one "),
        ("a\n\nb", ("\n\n",), "a"),
        ("\n\na\n\nb", ("\n\n",), "a"),
        ("aab", ("ab",), "a"),
        ("if a<b: </x>", ("</x>",), "if a<b: "),
        ("กำลัง 👩‍👩‍👧‍👦🇩🇪 end", ("🇩🇪",), "กำลัง 👩‍👩‍👧‍👦"),
    ],
)
def test_stop_strings(tokenizer: Tokenizer, text: str, stop: tuple[str, ...], content: str, parse_tools: bool) -> None:
    for seed in range(20):
        ids = cut_randomly(tokenizer, text, random.Random(seed))
        result = read(tokenizer, ids, stop=stop, parse_tools=parse_tools, finish="length")
        assert (result.content, result.finish_reason) == (content, "stop")
        kept = read(tokenizer, ids, stop=stop, parse_tools=parse_tools, include_stop_str_in_output=True)
        assert kept.content.startswith(content)
        assert kept.content.removeprefix(content) in stop


def test_stop_string_stops_at_its_last_token(tokenizer: Tokenizer) -> None:
    """What a rank needs: the flag comes with the token that completes the string, not later."""
    ids = tokens_of(tokenizer, "count: one two three four")
    texts = [tokenizer.decode(ids[: count + 1]) for count in range(len(ids))]
    expected = next(index for index, text in enumerate(texts) if "wo th" in text)
    parser = OutputParser(tokenizer, OutputFormat(), stop=("wo th",))
    flags = [parser.push(token).stopped for token in ids]
    assert flags == [index >= expected for index in range(len(ids))]


def test_stop_string_right_behind_half_a_character(tokenizer: Tokenizer) -> None:
    """P16: the half becomes one replacement mark."""
    half = tokenizer.encode_text("🐈")[:1]
    assert tokenizer.token_text(half[0]) == "\N{REPLACEMENT CHARACTER}"
    result = read(tokenizer, [*tokens_of(tokenizer, "cat "), *half, *tokens_of(tokenizer, "END more")], stop=("END",))
    assert result.content == "cat \N{REPLACEMENT CHARACTER}"


def test_half_a_character_stays_before_a_control_token(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode_text("🐈")[:1]
    ids = [*tokens_of(tokenizer, "ab"), *half, *tokens_of(tokenizer, "</think>cd"), *half, *tokens_of(tokenizer, DSML)]
    result = read(tokenizer, ids, thinking=True, parse_tools=True)
    assert result.reasoning == "ab\N{REPLACEMENT CHARACTER}"
    assert result.content == f"cd\N{REPLACEMENT CHARACTER}{DSML}"


def test_block_cut_inside_the_reasoning(tokenizer: Tokenizer) -> None:
    result = read(tokenizer, tokens_of(tokenizer, f"r\n\n<{DSML} cal"), thinking=True, parse_tools=True)
    assert (result.reasoning, result.content) == ("r", "")


def test_stop_string_neither_in_reasoning_nor_in_calls(tokenizer: Tokenizer) -> None:
    text = f"a END</think>x\n\n{block(invoke('f', parameter('k', 'END')))}"
    result = read(tokenizer, tokens_of(tokenizer, text), thinking=True, parse_tools=True, stop=("END", "invoke"))
    assert (result.reasoning, result.content) == ("a END", "x")
    assert [(call.name, call.arguments) for call in result.tool_calls] == [("f", '{"k": "END"}')]


def test_text_kind_shows_everything_but_flagged_tokens(tokenizer: Tokenizer) -> None:
    ids = [0, *tokens_of(tokenizer, f"\n\na<think>b</think>\n{block(PLAIN)}"), tokenizer.eos_token_id]
    result = read(tokenizer, ids, kind="text", parse_tools=True)
    assert result.content == f"\n\na<think>b</think>\n{block(PLAIN)}"
    assert (result.reasoning, result.tool_calls, result.finish_reason) == ("", (), "stop")
    shown = read(tokenizer, ids, kind="text", skip_special_tokens=False)
    assert shown.content == tokenizer.decode(ids, skip_special_tokens=False)


def test_begin_token_in_the_middle_never_shows(tokenizer: Tokenizer) -> None:
    ids = [*tokens_of(tokenizer, "ab"), tokenizer.bos_token_id, *tokens_of(tokenizer, "cd"), tokenizer.pad_token_id]
    assert read(tokenizer, ids, parse_tools=True).content == "abcd"


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_random_tokens_stream_to_the_same_text(tokenizer: Tokenizer, kind: str) -> None:
    """P15: 500 rows of random ids, many of them parts of characters, cut anywhere."""
    generator = random.Random(7)
    parts = [i for i in range(3, 128000) if "\N{REPLACEMENT CHARACTER}" in tokenizer.token_text(i)]
    for _ in range(500):
        pool = [generator.randrange(tokenizer.vocab_size), generator.choice(parts), generator.choice(parts)]
        ids = [generator.choice([*pool, generator.choice(parts)]) for _ in range(generator.randint(1, 20))]
        stop = tuple(tokenizer.token_text(generator.choice(parts))[:2] for _ in range(generator.randint(0, 2)))
        result = read(tokenizer, ids, kind=kind, stop=stop)
        if not stop and kind == "text":
            assert result.content == tokenizer.decode(ids)


def test_random_markup_never_crashes(tokenizer: Tokenizer) -> None:
    """Any order of markup pieces: no exception, calls have names, and the same result for any tokens."""
    generator = random.Random(11)
    pieces = [
        "\n\n", f"<{DSML} calls>", f"</{DSML} calls>", f'<{DSML} invoke name="search">', f"</{DSML} invoke>",
        f'<{DSML} parameter name="query" string="true">', f'<{DSML} parameter name="input">', f"</{DSML} parameter>",
        f'<{DSML} parameter name="n" string="false">', '{"a": 1}', "x", "<", "</", DSML, "<think>", "</think>", " ",
    ]  # fmt: skip
    for _ in range(300):
        text = "".join(generator.choices(pieces, k=generator.randint(1, 14)))
        thinking, finish = generator.random() < 0.5, generator.choice(["stop", "length"])
        results = [
            as_golden(read(tokenizer, ids, thinking=thinking, parse_tools=True, tools=TOOLS, finish=finish))
            for ids in (tokens_of(tokenizer, text), cut_randomly(tokenizer, text, generator))
        ]
        assert results[0] == results[1], text
        assert all(call["name"] == "search" for call in results[0]["tool_calls"])
