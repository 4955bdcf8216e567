"""Masks, committed tokens, drafts and their way back, the end, and the boundary of the reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import xgrammar
from grammar_case import DSML, EOS, THINK_CLOSE, TOKENIZER, VOCAB_SIZE, compiled, json_spec, masks, regex_spec, sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.protocol import GrammarSpec

BOOLEAN = json_spec({"type": "boolean"})
CITY = json_spec({"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}})
SPECS = [BOOLEAN, CITY, regex_spec(r"[ab]{0,3}c"), GrammarSpec(kind="ebnf", text='root ::= "" | "a" root "b"')]
ANYTHING = GrammarSpec(kind="ebnf", text="root ::= [^x]*")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_text(text)


def test_each_token_of_an_answer_is_allowed_and_then_only_the_end() -> None:
    grammar = sequence(CITY)
    for token_id in ids('{"city": "the world", "n": 12}'):
        assert token_id in masks(grammar)[1][0]
        grammar.accept([token_id])
    assert masks(grammar)[1] == [{EOS}]
    grammar.accept([EOS])
    assert masks(grammar)[1] == [{EOS}]  # nothing is asked of the engine any more
    assert grammar.failure is None


@pytest.mark.parametrize("spec", [*SPECS, ANYTHING])
def test_no_control_token_is_ever_allowed(spec: GrammarSpec) -> None:
    grammar = sequence(spec)
    for _ in range(12):
        allowed = masks(grammar)[1][0]
        assert not (allowed - {EOS}) & TOKENIZER.added_token_ids
        grammar.accept(sorted(allowed - {EOS})[:1])


def test_the_engine_does_what_this_module_relies_on() -> None:
    """A refused token changes nothing, roll-back crosses the end, the end is final: another version may differ."""
    matcher = xgrammar.GrammarMatcher(compiled(BOOLEAN))
    words = torch.zeros(1, 20, dtype=torch.int32)
    for token_id in ids("true"):
        assert not matcher.accept_token(ids("x")[0])
        assert matcher.accept_token(token_id)
    assert matcher.is_completed()
    assert not matcher.is_terminated()
    assert matcher.accept_token(EOS)
    assert matcher.is_terminated()
    with pytest.raises(RuntimeError):
        matcher.fill_next_token_bitmask(words)
    matcher.rollback(1 + len(ids("true")))
    assert matcher.fill_next_token_bitmask(words)
    assert words.any()


def test_a_token_that_the_grammar_refuses_fails_the_sequence_only() -> None:
    one, other = sequence(BOOLEAN), sequence(BOOLEAN)
    one.accept(ids("x"))
    assert one.failure is not None
    assert other.failure is None
    assert masks(other)[1][0]


def test_a_grammar_without_any_way_on_fails_the_sequence() -> None:
    grammar = sequence(GrammarSpec(kind="ebnf", text="root ::= root"))
    masks(grammar)
    assert grammar.failure is not None


@pytest.mark.parametrize(("drafts", "num_valid"), [("", 0), ("x", 0), ("tr", 2), ("trx", 2), ("trueue", 4)])
def test_drafts_are_cut_before_the_first_that_is_refused(drafts: str, num_valid: int) -> None:
    tokens = [ids(letter)[0] for letter in drafts]
    grammar = sequence(BOOLEAN)
    valid, rows = masks(grammar, tokens)
    assert valid == num_valid
    assert len(rows) == num_valid + 1
    assert all(token_id in row for token_id, row in zip(tokens[:valid], rows, strict=False))


def test_drafts_are_cut_before_the_end() -> None:
    """P19: drafts go on behind the end token; the row that may draw it is the last one that is needed."""
    drafts = [*ids("true"), EOS, *ids("true")]
    valid, rows = masks(sequence(BOOLEAN), drafts)
    assert valid == len(ids("true"))
    assert rows[-1] == {EOS}


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_masks_with_drafts_equal_those_of_a_fresh_replay(data: st.DataObject) -> None:
    """The state after any mixture of drafts and commits is that of the committed tokens alone."""
    spec = data.draw(st.sampled_from(SPECS))
    in_reasoning = data.draw(st.booleans())
    grammar, committed = sequence(spec, in_reasoning=in_reasoning), []
    for _ in range(data.draw(st.integers(1, 8))):
        drafts = _plausible(data, spec, committed, in_reasoning)
        valid, rows = masks(grammar, drafts)
        for count in range(valid + 1):
            fresh = sequence(spec, in_reasoning=in_reasoning, token_ids=[*committed, *drafts[:count]])
            assert masks(fresh)[1] == [rows[count]]
        kept = drafts[: data.draw(st.integers(0, valid))]
        last = data.draw(st.sampled_from(sorted(rows[len(kept)])))
        committed += [*kept, last]
        grammar.accept([*kept, last])
        assert grammar.failure is None


def _plausible(data: st.DataObject, spec: GrammarSpec, committed: list[int], in_reasoning: bool) -> list[int]:
    """Up to five drafts, most of them allowed."""
    fresh, drafts = sequence(spec, in_reasoning=in_reasoning, token_ids=committed), []
    while len(drafts) < 5 and data.draw(st.integers(0, 6)):
        allowed = masks(fresh)[1][0] - {EOS} or {EOS}
        wild = data.draw(st.integers(0, 5)) == 0
        token_id = data.draw(st.integers(0, VOCAB_SIZE - 1) if wild else st.sampled_from(sorted(allowed)))
        drafts.append(THINK_CLOSE if in_reasoning and data.draw(st.integers(0, 4)) == 0 else token_id)
        fresh = sequence(spec, in_reasoning=in_reasoning, token_ids=[*committed, *drafts])
        if fresh.failure is not None:
            break
    return drafts


@pytest.mark.parametrize("boundary", range(6))
def test_the_grammar_begins_behind_the_reasoning_at_every_place_of_a_draft_run(boundary: int) -> None:
    """P18, P20: rows before the end of the reasoning are free but for the end of sequence, rows behind it are not."""
    thought = ids("hello the question")[:boundary]
    drafts = [*thought, THINK_CLOSE, *ids('{"city')][:5]
    valid, rows = masks(sequence(CITY, in_reasoning=True), drafts)
    assert valid == len(drafts)
    free = set(range(VOCAB_SIZE)) - {EOS}
    for place, row in enumerate(rows):
        if place <= boundary:
            assert row == free
        else:
            assert row == masks(sequence(CITY, token_ids=drafts[boundary + 1 : place]))[1][0]


def test_a_code_fence_behind_the_reasoning_is_cut() -> None:
    valid, rows = masks(sequence(CITY, in_reasoning=True), [THINK_CLOSE, *ids("```json\n{")])
    assert valid == 1
    assert not rows[1] & set(ids("`"))


def test_reasoning_is_left_alone_and_replayed() -> None:
    output = [*ids('I think {"city": 3} is wrong. </think>'), THINK_CLOSE, *ids('{"city": "a')]
    grammar = sequence(CITY, in_reasoning=True, token_ids=output)
    assert grammar.failure is None
    assert masks(grammar)[1] == masks(sequence(CITY, token_ids=ids('{"city": "a')))[1]


TOOLS = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "spot": {"$ref": "#/$defs/spot"},
            },
            "required": ["city", "days"],
            "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "number"}}}},
        },
    },
    {"name": "now", "parameters": {}},
]


def _call(body: str) -> list[int]:
    """Ids of markup in which | stands for the mark."""
    found: list[int] = []
    for place, piece in enumerate(body.split("|")):
        found += ([DSML] if place else []) + (ids(piece) if piece else [])
    return found


def _argument(name: str, value: str, *, is_text: bool = True) -> str:
    return f'<| parameter name="{name}" string="{"true" if is_text else "false"}">{value}</| parameter>\n'


CITY_ARGUMENT, DAYS = _argument("city", 'Oslo <"x">\n</y>'), _argument("days", "7", is_text=False)


@pytest.mark.parametrize(
    ("arguments", "is_good"),
    [
        ([CITY_ARGUMENT, DAYS], True),
        ([CITY_ARGUMENT], False),
        ([CITY_ARGUMENT, _argument("unit", "C"), DAYS], True),
        ([CITY_ARGUMENT, _argument("unit", "K"), DAYS], False),
        ([CITY_ARGUMENT, _argument("days", "12", is_text=False)], False),
        ([CITY_ARGUMENT, DAYS, _argument("spot", '{"x": 1.5}', is_text=False)], True),
        ([CITY_ARGUMENT, DAYS, _argument("spot", '{"y": 1.5}', is_text=False)], False),
    ],
)
def test_a_forced_call_is_one_call_of_a_declared_tool(arguments: list[str], is_good: bool) -> None:
    body = f'\n\n<| calls>\n<| invoke name="weather">\n{"".join(arguments)}</| invoke>\n</| calls>'
    grammar = sequence(GrammarSpec(kind="tool_calls", text=json.dumps(TOOLS)), token_ids=_call(body))
    assert (grammar.failure is None and masks(grammar)[1] == [{EOS}]) == is_good


def test_a_forced_call_without_arguments() -> None:
    body = '\n\n<| calls>\n<| invoke name="now">\n\n</| invoke>\n</| calls>'
    grammar = sequence(GrammarSpec(kind="tool_calls", text=json.dumps(TOOLS)), token_ids=_call(body))
    assert masks(grammar)[1] == [{EOS}]


def test_the_mark_of_a_call_can_not_be_spelled_out() -> None:
    grammar = sequence(GrammarSpec(kind="tool_calls", text=json.dumps(TOOLS)), token_ids=ids("\n\n<"))
    assert masks(grammar)[1] == [{DSML}]


def test_a_mask_row_is_written_whole() -> None:
    rows: Any = [masks(sequence(spec))[1] for spec in SPECS]
    words = torch.full((1, sequence(CITY).num_words), -1, dtype=torch.int32)
    for spec, expected in zip(SPECS, rows, strict=True):
        sequence(spec).fill(words)
        assert words.ne(-1).any()
        assert masks(sequence(spec))[1] == expected
