"""Which regular expressions can be enforced, and their form for the grammar engine.

xgrammar 0.2.9 refuses some constructs and takes others for something else: an anchor in the middle is dropped, an
unknown escape stands for its letter, `.` and negated classes match line ends and the code points of surrogates, whose
bytes are no UTF-8. What can't be put right is refused here.
"""

from __future__ import annotations

import re

from deepinfer.errors import RequestError, shown

MAX_REGEX_CHARACTERS = 8192
_SURROGATES = r"\ud800-\udfff"
_ESCAPE = r"\\(?:[dDwWsSnrtfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^\w\s])"
_CLASS = re.compile(rf"\[(\^?)((?:{_ESCAPE}|[^\\\[\]])+)\]")
_ITEM = re.compile(rf"({_ESCAPE})|(\(\?:)|(\(\?)|(.)", re.DOTALL)
_ESCAPED_IN_JSON = re.compile(r'["\x00-\x1f]|\\\\|\\[nrtfv]|\\x(?:[01].|22|5[cC])|\\u00(?:[01].|22|5[cC])')
_NEGATED = {r"\D": r"\d", r"\W": r"\w", r"\S": r"\s"}
_EVERYTHING = {r"\s\S", r"\S\s", r"\d\D", r"\D\d", r"\w\W", r"\W\w"}
_QUANTIFIER_ENDS = ("*", "+", "?", "}")
_SET_OPERATORS = ("--", "&&", "||", "~~")  # some engines read them as operations on classes


def normalize_regex(text: str, *, param: str, code: str = "invalid_value", in_json: bool = False) -> str:
    """Return `text` in the form for the grammar engine: it matches whole texts, and `.` no line end.

    `in_json`: the text stands in a JSON string, where the engine never writes an escape. Raises RequestError with
    `param` and `code` for what can't be enforced as it is meant.
    """
    if len(text) > MAX_REGEX_CHARACTERS:
        raise _refuse(param, code, f"has {len(text)} characters, {MAX_REGEX_CHARACTERS} are allowed")
    body = _without_anchors(text)
    parts: list[str] = []
    position = 0
    while position < len(body):
        pattern = _CLASS if body[position] == "[" else _ITEM
        match = pattern.match(body, position)
        if match is None:
            raise _refuse(param, code, f"has a class at {shown(body[position : position + 12])} that can't be enforced")
        problem, part = _rewrite_class(match) if pattern is _CLASS else _rewrite_item(match)
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


def _rewrite_class(match: re.Match[str]) -> tuple[str, str]:
    """Return what is wrong with a class ("" if nothing), and its form without surrogates."""
    negation, items = match.groups()
    if any(operator in items for operator in _SET_OPERATORS):
        return f"has {shown(match.group())}; escape the doubled characters in the class", ""
    if not negation and items in _EVERYTHING:
        return "", f"[^{_SURROGATES}]"
    if any(f"\\{letter}" in items.replace("\\\\", "") for letter in "DWS"):
        return f"has {shown(match.group())}; \\D, \\W and \\S can't be enforced inside a class", ""
    return "", f"[^{items}{_SURROGATES}]" if negation else match.group()


def _rewrite_item(match: re.Match[str]) -> tuple[str, str]:
    """The same for an escape, the opening of a group, or one character."""
    escape, _, flag, character = match.groups()
    if escape is not None:
        inner = _NEGATED.get(escape)
        return "", escape if inner is None else f"[^{inner}{_SURROGATES}]"
    if flag is not None:
        return "has a group that is not plain; use (...) or (?:...)", ""
    if character == "\\":
        return f"has the escape {match.string[match.start() : match.start() + 2]}, which can't be enforced", ""
    if character is not None and character in "^$":
        return f"has the anchor {shown(character)} in the middle; the whole text is matched, remove it", ""
    return "", rf"[^\n\r{_SURROGATES}]" if character == "." else match.group()


def _compile(text: str, param: str, code: str) -> None:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refuse(param, code, f"can't be read ({error})") from error


def _refuse(param: str, code: str, problem: str) -> RequestError:
    return RequestError(f"{param}: the regular expression {problem}", code=code, param=param)
