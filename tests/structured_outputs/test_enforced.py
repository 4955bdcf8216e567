"""What passes the schema check is enforced by the compiled grammar: accepted and refused examples of each keyword."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from grammar_case import compiled, json_spec, regex_spec, takes, takes_text, takes_value
from hypothesis import given, settings
from hypothesis import strategies as st

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
AB = {"a": INTEGER, "b": TEXT}
LIST = {
    "$defs": {"n": {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}},
    "$ref": "#/$defs/n",
}
KINDS = [
    {"type": "object", "properties": {"kind": {"const": "a"}, "n": INTEGER}, "required": ["kind", "n"]},
    {"type": "object", "properties": {"kind": {"const": "b"}, "n": TEXT}, "required": ["kind", "n"]},
]

# schema, values it allows, values it does not
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (INTEGER, [0, -3, 5], [1.5, "1", None, True]),
    ({"type": "number"}, [0, -1.5, 2e-7], ["1", None]),
    ({"type": "boolean"}, [True, False], [0, "true", None]),
    ({"type": "null"}, [None], [0, ""]),
    ({"type": ["string", "null"]}, ["x", None], [1]),
    ({"type": ["string", "integer"], "minLength": 2, "minimum": 5}, ["ab", 5], ["a", 4]),
    ({"type": "integer", "minimum": -5, "maximum": 17}, [-5, 0, 17], [-6, 18]),
    ({"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 17}, [-4, 16], [-5, 17]),
    ({"type": "integer", "multipleOf": 7, "minimum": 3, "maximum": 20}, [7, 14], [0, 3, 8, 21]),
    ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1], [-0.1, 1.5, 2]),
    ({"type": "number", "exclusiveMinimum": 0}, [0.001, 5], [0, 0.0, -1]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["", "a", "abcd", "a\t"]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["", "d", "ab\n"]),
    ({"type": "string", "pattern": "^.{2}$"}, ["a;", "é€"], ["a", "a\n", "a\u2028b"]),
    ({"type": "string", "pattern": r"^-[^x\\]\.$"}, ["-a.", "-é."], ["-x.", "a", "-\\."]),
    ({"enum": [1, "x", None, {"a": [1]}, 2.5]}, [1, "x", None, {"a": [1]}, 2.5], [2, "y", {}, {"a": 1}]),
    ({"type": "string", "enum": ["x", "y"]}, ["x"], ["z", 1]),
    ({"const": 'a"b\\c\nd'}, ['a"b\\c\nd'], ["a"]),
    ({"anyOf": [INTEGER, TEXT]}, [1, "x"], [None, 1.5]),
    ({"oneOf": [INTEGER, TEXT]}, [1, "x"], [None]),
    ({"oneOf": KINDS}, [{"kind": "a", "n": 1}, {"kind": "b", "n": "x"}], [{"kind": "a", "n": "x"}, {"kind": "c"}]),
    ({"allOf": [INTEGER]}, [1], ["x"]),
    ({"type": "array", "items": INTEGER}, [[], [1, 2]], [["x"], 1]),
    ({"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3]], [[1], [1, 2, 3, 4]]),
    ({"type": "array", "prefixItems": [INTEGER, TEXT], "items": False}, [[1, "a"], []], [[1, "a", 2], ["a"]]),
    ({"prefixItems": [INTEGER], "items": TEXT, "minItems": 2}, [[1, "x"], [1, "x", "y"]], [[1], ["x", "x"], [1, 2]]),
    ({"type": "object", "properties": AB, "required": ["b"]}, [{"b": ""}, {"a": 1, "b": ""}], [{}, {"a": 1}]),
    ({"type": "object", "properties": AB}, [{}, {"a": 1}], [{"c": 1}, {"a": "x"}]),
    ({"properties": AB, "minProperties": 1, "maxProperties": 1}, [{"a": 1}, {"b": ""}], [{}, {"a": 1, "b": ""}]),
    ({"type": "object", "additionalProperties": INTEGER}, [{}, {"x": 1, "y": 2}], [{"x": "a"}]),
    ({"type": "object", "maxProperties": 1, "additionalProperties": True}, [{}, {"x": [1]}], [{"x": 1, "y": 2}]),
    ({"type": "object", "properties": {'k"\n/~é': INTEGER}}, [{'k"\n/~é': 1}], [{"k": 1}]),
    (LIST, [{"v": 1}, {"v": 1, "next": {"v": 2}}], [{}, {"v": 1, "next": {}}]),
    ({"type": "array", "prefixItems": [TEXT, {"$ref": "#/prefixItems/0"}], "minItems": 2}, [["a", "b"]], [["a", 1]]),
    ({}, [1, "a", None, [], {"x": [1, {}]}], []),
]  # fmt: skip

FORMATS = [
    ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01"]),
    ("time", ["23:59:59Z", "08:30:06.28+01:30"], ["24:00:00Z", "12:00:60Z", "12:00:00", "12:00:00+24:00"]),
    ("date-time", ["2024-02-29T10:00:00Z"], ["2024-02-30T10:00:00Z", "2024-02-29 10:00:00Z", "2024-02-29"]),
    ("duration", ["P1D", "PT2H3M"], ["P", "1D", "PT1D"]),
    ("email", ["a.b@example.com"], ["a", "@b", "a@"]),
    ("ipv4", ["192.168.0.255"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    ("ipv6", ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2", "1:2:3:4:5:6:7::"], [":::", "1::2::3", "1:2:3"]),
    ("ipv6", [], ["12345::", "::1%eth0", "1:2:3:4:5:6:7:8::", "::1.2.3.400"]),
    ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    ("uri", ["http://a.b/c?d#e", "ldap://[2001:db8::7]/c=GB?x?y", "mailto:a@b.c", "x:"], ["//a.b", "a b", "h://a:b/c"]),
    ("uri-reference", ["/a/b?c", "#d", "", "http://a.b/c", "//a:80"], ["\\a", "1:b", "//a@b@c/", "//a:b"]),
    ("uri-template", ["/a/{b}", "{+x:3,y*}", "a'b", "\U0001f600"], ["/a/{b", "{}", "{a:0}", "%2"]),
    ("json-pointer", ["", "/a~1b/0"], ["a", "/~2"]),
    ("relative-json-pointer", ["0#", "1/a"], ["/a", "-1/a"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_values(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not takes_value(schema, value)] == []
    assert [value for value in bad if takes_value(schema, value)] == []


@pytest.mark.parametrize(("name", "good", "bad"), FORMATS)
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "format": name}
    assert [value for value in good if not takes_value(schema, value)] == []
    assert [value for value in bad if takes_value(schema, value)] == []


@pytest.mark.parametrize("schema", [TEXT, {"type": "string", "maxLength": 9}, {"type": "string", "pattern": "^[^x]*$"}])
@pytest.mark.parametrize(
    "inner", [b"\t", b"\n", b"\x00", b"\x1f", b'"', b"\\", b"\xff", b"\xc0\x80", b"\xf4\x90\x80\x80"]
)
def test_no_string_can_hold_what_is_no_json(schema: Any, inner: bytes) -> None:
    assert not takes(json_spec(schema), b'"' + inner + b'"')


@pytest.mark.parametrize("schema", [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^.{0,3}$"}])
def test_a_length_is_not_met_by_bytes_that_are_no_text(schema: Any) -> None:
    """The bytes of a surrogate would be read as three replacement characters."""
    assert not takes(json_spec(schema), b'"\xed\xa0\x80"')


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"\\u0061": 1}', '{"a":1,}', '{"a":01}', "{'a':1}"])
def test_objects_have_no_second_spelling(text: str) -> None:
    assert not takes(json_spec({"type": "object", "properties": {"a": INTEGER}}), text)


def test_white_space_is_bounded() -> None:
    spec = json_spec({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]})
    assert takes(spec, '{"a":1}')
    assert takes(spec, '{\n    "a": 1\n}')
    assert takes(spec, "{" + " " * 8 + '"a":1}')
    assert not takes(spec, "{" + " " * 9 + '"a":1}')
    assert not takes(spec, ' {"a":1}')
    assert not takes(spec, '{"a":1} ')


@given(low=st.integers(-(10**6), 10**6), size=st.integers(0, 10**5), value=st.integers(-(10**6), 2 * 10**6))
@settings(max_examples=60, deadline=None)
def test_ranges_of_integers(low: int, size: int, value: int) -> None:
    schema = {"type": "integer", "minimum": low, "maximum": low + size}
    for candidate in (value, low - 1, low, low + size, low + size + 1):
        assert takes_value(schema, candidate) == (low <= candidate <= low + size)


@given(
    low=st.decimals(-1000, 1000, places=3, allow_nan=False),
    size=st.decimals(0, 50, places=3, allow_nan=False),
    value=st.decimals(-1100, 1100, places=4, allow_nan=False),
)
@settings(max_examples=60, deadline=None)
def test_ranges_of_numbers_let_nothing_through(low: Any, size: Any, value: Any) -> None:
    schema = {"type": "number", "minimum": float(low), "maximum": float(low + size)}
    for text in (f"{value:f}", f"{low:f}", f"{low + size:f}", f"{low:f}1", f"{low + size:f}1", "-0", "1e3"):
        if takes(json_spec(schema), text):
            assert schema["minimum"] <= float(text) <= schema["maximum"], text


# Patterns of which xgrammar's automaton took more than they say, each with one of those texts.
TOO_MUCH = [
    ("(?:b*c)?a", "ba"),
    ("(?:c+b)??[bc]{0,2}", "ccc"),
    ("[ab]{1,2}|[ab]{0,1}", "aaa"),
    ("b{0,1}|(?:c+|(?:b){1,2})", "bbb"),
    ("(?:(?:a(?:ab*[ab]){0,2}){0,}){0,}", "ab"),
]


@pytest.mark.parametrize(("pattern", "text"), TOO_MUCH)
def test_patterns_take_no_more_than_they_say(pattern: str, text: str) -> None:
    assert not takes_value({"type": "string", "pattern": f"^(?:{pattern})$"}, text)


def _random_pattern(numbers: random.Random, depth: int) -> str:
    def piece() -> str:
        if depth and numbers.random() < 0.5:
            atom = f"(?:{_random_pattern(numbers, depth - 1)})"
        else:
            atom = numbers.choice(["a", "b", "c", "[ab]", "[^a]", "."])
        return atom + numbers.choice(["", "", "*", "+", "?", "{0,2}", "{1,2}", "{2}", "{1,}", "*?", "??"])

    branches = ["".join(piece() for _ in range(numbers.randrange(1, 4))) for _ in range(numbers.choice([1, 1, 2, 3]))]
    return "|".join([*branches, ""] if numbers.random() < 0.1 else branches)


def test_random_patterns_of_strings_mean_what_python_means() -> None:
    numbers = random.Random(7)
    texts = ["".join(letters) for size in range(5) for letters in itertools.product("abc", repeat=size)]
    for _ in range(300):
        pattern = _random_pattern(numbers, 3)
        if len(pattern) <= 60:
            spec = json_spec({"type": "string", "pattern": f"^(?:{pattern})$"})
            grammar = compiled.__wrapped__(spec)
            meant = re.compile(pattern)
            wrong = [text for text in texts if takes_text(grammar, f'"{text}"') != bool(meant.fullmatch(text))]
            assert wrong == [], pattern


@pytest.mark.parametrize(
    "name", [r"[ -~]", "[^x]", "[^é]", r"[^\d\s]", r"[\Wa]", r"\S", r"\s", ".", r"[!-\]é]", r"[\-A^]", "[ä-ü^-]"]
)
def test_a_class_in_a_string_holds_what_it_says_but_nothing_that_json_escapes(name: str) -> None:
    """Patterns with a letter that is not ASCII went another way in the engine, on which the quote came through."""
    grammar = compiled(json_spec({"type": "string", "pattern": f"^{name}$"}))
    flags = re.ASCII if "\\W" in name else 0
    for code_point in (*range(0x85), *range(0x86, 0x180), 0x2028, 0xD7FF, 0xE000, 0xFFFF, 0x1F600, 0x10FFFF):
        text = chr(code_point)
        is_meant = bool(re.fullmatch(name, text, flags)) and text not in '\n\r"\\\\' and code_point > 0x1F
        assert takes_text(grammar, f'"{text}"') == is_meant, hex(code_point)


PATTERNS = [
    r"[a-c]{2,4}",
    r"(?:ab|c)*d?",
    r"\d{3}-\d{4}",
    r".{1,3}",
    r"[^a]b",
    r"\w+\s\S",
    r"\$\.\\",
    r"a*?b",
    r"x|",
    r"[\s\S]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_regular_expressions_mean_what_python_means(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(pattern, fullmatch=True) | st.text("abcd019-x$.\\ \n\té", max_size=6))
    if text.isascii() and not re.search(
        "[\x1c-\x1f]", text
    ):  # spaces for Python alone; \d and \w are ASCII for the engine, as in ECMA 262
        is_line_end = "\r" in text and "." in pattern.replace("\\.", "")  # which `.` never matches here
        assert takes(regex_spec(pattern), text) == bool(re.fullmatch(pattern, text)) or is_line_end
