"""String formats (RFC 3339, 3986, 4291, 6570 and others) that can be enforced; some by a pattern of our own.

xgrammar 0.2.9 takes a day of the month, a leap second, a leading zero or an IPv4 tail where none can stand, takes no
absolute URI for a reference, and no IPv6 host in a URI, so those formats are spelled out here. Left out on purpose:
leap seconds, lower-case "t" and "z", IPv6 addresses that end in an IPv4 address.
"""

from __future__ import annotations

from typing import Final

# Formats whose own rule in xgrammar 0.2.9 accepts nothing that the JSON Schema Test Suite calls invalid.
NATIVE_FORMATS: Final = (
    "duration",
    "email",
    "json-pointer",
    "relative-json-pointer",
    "uuid",
)

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+\-]{_CLOCK})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Eight groups, or fewer around one `::` that stands for at least one of them."""
    forms = [f"(?:{_GROUP}:){{7}}{_GROUP}", f"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?"]
    for num_left in range(1, 8):
        left = f"{_GROUP}(?::{_GROUP}){{{num_left - 1}}}::"
        num_right = 7 - num_left
        forms.append(left + (f"(?:{_GROUP}(?::{_GROUP}){{0,{num_right - 1}}})?" if num_right else ""))
    return f"(?:{'|'.join(forms)})"


_PERCENT = "%[0-9A-Fa-f]{2}"
_FREE = r"A-Za-z0-9\-._~!$&'()*+,;="  # unreserved characters and sub-delimiters


def _uri_forms() -> tuple[str, str]:
    """An absolute URI and a relative reference, RFC 3986 appendix A; hosts are names, IPv4 or IPv6 addresses."""
    part = f"(?:[{_FREE}:@]|{_PERCENT})"
    host = rf"(?:\[{_ipv6()}\]|(?:[{_FREE}]|{_PERCENT})*)"
    authority = f"//(?:(?:[{_FREE}:]|{_PERCENT})*@)?{host}(?::[0-9]*)?(?:/{part}*)*"
    rooted = f"/(?:{part}+(?:/{part}*)*)?"
    behind = rf"(?:\?(?:{part}|[/?])*)?(?:#(?:{part}|[/?])*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:{authority}|{rooted}|{part}+(?:/{part}*)*|){behind}"
    relative = f"(?:{authority}|{rooted}|(?:[{_FREE}@]|{_PERCENT})+(?:/{part}*)*|){behind}"
    return absolute, relative


def _uri_template() -> str:
    """RFC 6570 with erratum 6937, which makes the apostrophe a literal."""
    literal = rf'(?:[^\0-\x20"%<>\\^`{{|}}\x7f-\x9f\ud800-\udfff]|{_PERCENT})'
    letter = f"(?:[A-Za-z0-9_]|{_PERCENT})"
    variable = rf"{letter}(?:\.?{letter})*(?::[1-9][0-9]{{0,3}}|\*)?"
    return rf"(?:{literal}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*"


_URI, _RELATIVE = _uri_forms()

# Of whole texts.
FORMAT_PATTERNS: Final = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _ipv6(),
    "time": _TIME,
    "uri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "uri-template": _uri_template(),
}
