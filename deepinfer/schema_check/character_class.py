"""Classes of characters as ranges of code points, so that some can be taken out of them.

`Ranges`: (first, last) pairs, sorted, apart from each other. Shorthands are those of ECMA 262: digits and letters are
ASCII, spaces are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

Ranges = tuple[tuple[int, int], ...]

LAST_CODE_POINT = 0x10FFFF
ESCAPE = r"\\(?:[dDwWsSnrtfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^\w\s])"
_ITEM = re.compile(rf"{ESCAPE}|.", re.DOTALL)
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_SHORTHANDS: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": (
        *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ),
}


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all code points that are not in `ranges` (in any order)."""
    left, begin = [], 0
    for first, last in sorted(ranges):
        if first > begin:
            left.append((begin, first - 1))
        begin = max(begin, last + 1)
    return (*left, (begin, LAST_CODE_POINT)) if begin <= LAST_CODE_POINT else tuple(left)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the code points of `ranges` that are not in `others`."""
    return complement((*complement(ranges), *others))


def parse_class(items: str) -> Ranges:
    """Return what the inside of a class stands for, without its sign of negation; one that `re` refuses: anything."""
    found: list[tuple[int, int]] = []
    tokens = [match.group() for match in _ITEM.finditer(items)]
    place = 0
    while place < len(tokens):
        is_range = place + 2 < len(tokens) and tokens[place + 1] == "-"
        first = _meaning(tokens[place])
        found += ((first[0][0], _meaning(tokens[place + 2])[0][0]),) if is_range else first
        place += 3 if is_range else 1
    return complement(complement(found))


def write_class(ranges: Ranges) -> str:
    """Return the class of `ranges`, which must not be empty; only letters and digits stand for themselves in it."""
    if ranges[-1][1] == LAST_CODE_POINT:
        return f"[^{''.join(_written(complement(ranges)))}]"
    return f"[{''.join(_written(ranges))}]"


def _meaning(token: str) -> Ranges:
    if not token.startswith("\\") or len(token) == 1:
        return ((ord(token), ord(token)),)
    name = token[1]
    if name.lower() in _SHORTHANDS:
        shorthand = _SHORTHANDS[name.lower()]
        return shorthand if name.islower() else complement(shorthand)
    code_point = int(token[2:], 16) if name in "xu" else _CONTROLS.get(name, ord(name))
    return ((code_point, code_point),)


def _written(ranges: Ranges) -> Iterator[str]:
    for first, last in ranges:
        yield _character(first) if first == last else f"{_character(first)}-{_character(last)}"


def _character(code_point: int) -> str:
    text = chr(code_point)
    return text if code_point > 0xFFFF or (text.isascii() and text.isalnum()) else f"\\u{code_point:04x}"
