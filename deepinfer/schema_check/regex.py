"""Which regular expressions can be enforced, and their form for the grammar engine.

xgrammar 0.2.9 refuses some constructs and takes others for something else: an anchor in the middle is dropped, an
unknown escape stands for its letter, `.` and negated classes match line ends and the code points of surrogates, whose
bytes are no UTF-8, and in JSON strings perhaps the quote. What can't be put right is refused here.
"""

from __future__ import annotations

import re

from deepinfer.errors import RequestError, shown
from deepinfer.schema_check.character_class import ESCAPE, Ranges, complement, parse_class, without, write_class

MAX_REGEX_CHARACTERS = 8192
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
_NOT_IN_STRINGS: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), *_SURROGATES)  # of JSON, unless escaped
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D))
_CLASS = re.compile(rf"\[(\^?)((?:{ESCAPE}|[^\\\[\]])+)\]")
_ITEM = re.compile(rf"({ESCAPE})|(\(\?:)|(\(\?)|(.)", re.DOTALL)
_ESCAPED_IN_JSON = re.compile(r'["\x00-\x1f]|\\\\|\\[nrtfv]|\\x(?:[01].|22|5[cC])|\\u00(?:[01].|22|5[cC])')
_QUANTIFIER_ENDS = ("*", "+", "?", "}")
_SET_OPERATORS = ("--", "&&", "||", "~~")  # some engines read them as operations on classes
_BY_RULES = "é{0}"


def whole_text_pattern(body: str) -> str:
    """Return the pattern of a JSON string that is matched by `body` from end to end.

    xgrammar 0.2.9 has two ways for patterns: an automaton where all is ASCII, and rules. The automaton is wrong: of
    `(?:a*c)?b` it takes "aab", of `a{1,2}|a?` "aaa". So a character that is not ASCII is there, no times.
    """
    return f"^{_BY_RULES}(?:{body})$"


def normalize_regex(text: str, *, param: str, code: str = "invalid_value", in_json: bool = False) -> str:
    """Return `text` in the form for the grammar engine: it matches whole texts, and `.` no line end.

    `in_json`: the text stands in a JSON string, where the engine never writes an escape. Raises RequestError with
    `param` and `code` for what can't be enforced as it is meant.
    """
    if len(text) > MAX_REGEX_CHARACTERS:
        raise _refuse(param, code, f"has {len(text)} characters, {MAX_REGEX_CHARACTERS} are allowed")
    body = _without_anchors(text)
    excluded = _NOT_IN_STRINGS if in_json else _SURROGATES
    parts: list[str] = []
    position = 0
    while position < len(body):
        pattern = _CLASS if body[position] == "[" else _ITEM
        match = pattern.match(body, position)
        if match is None:
            raise _refuse(param, code, f"has a class at {shown(body[position : position + 12])} that can't be enforced")
        problem, part = (_rewrite_class if pattern is _CLASS else _rewrite_item)(match, excluded)
        if match.group() == "+" and parts and parts[-1] in _QUANTIFIER_ENDS:
            problem = "has a possessive quantifier; leave its second sign out"
        if in_json and not match.group().startswith("[^") and _ESCAPED_IN_JSON.search(match.group()):
            problem = (
                f"has {shown(match.group())}: quotes, backslashes and control characters can't be enforced in strings"
            )
        if problem:
            raise _refuse(param, code, problem)
        parts.append(part)
        position = match.end()
    _compile(text, param, code)
    return "".join(parts)


def _without_anchors(text: str) -> str:
    """Drop a `^` at the beginning and a `$` at the end: the whole text is matched in any case."""
    body = text.removeprefix("^")
    num_escapes = len(body) - 1 - len(body[:-1].rstrip("\\"))
    return body[:-1] if body.endswith("$") and num_escapes % 2 == 0 else body


def _rewrite_class(match: re.Match[str], excluded: Ranges) -> tuple[str, str]:
    """Return what is wrong with a class ("" if nothing), and its form without the `excluded` characters."""
    negation, items = match.groups()
    if any(operator in items for operator in _SET_OPERATORS):
        return f"has {shown(match.group())}; escape the doubled characters in the class", ""
    ranges = parse_class(items)
    return _write(match.group(), complement(ranges) if negation else ranges, excluded)


def _rewrite_item(match: re.Match[str], excluded: Ranges) -> tuple[str, str]:
    """The same for an escape, the opening of a group, or one character."""
    escape, _, flag, character = match.groups()
    if escape is not None:
        return _write(escape, parse_class(escape), excluded) if escape[1] in "dDwWsS" else ("", escape)
    if flag is not None:
        return "has a group that is not plain; use (...) or (?:...)", ""
    if character == "\\":
        return f"has the escape {match.string[match.start() : match.start() + 2]}, which can't be enforced", ""
    if character is not None and character in "^$":
        return f"has the anchor {shown(character)} in the middle; the whole text is matched, remove it", ""
    return _write(".", complement(_LINE_ENDS), excluded) if character == "." else ("", match.group())


def _write(text: str, ranges: Ranges, excluded: Ranges) -> tuple[str, str]:
    left = without(ranges, excluded)
    return (
        ("", write_class(left)) if left else (f"has {shown(text)}, which matches no character that can stand there", "")
    )


def _compile(text: str, param: str, code: str) -> None:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refuse(param, code, f"can't be read ({error})") from error


def _refuse(param: str, code: str, problem: str) -> RequestError:
    return RequestError(f"{param}: the regular expression {problem}", code=code, param=param)
