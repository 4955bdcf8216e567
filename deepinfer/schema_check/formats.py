"""String formats (RFC 3339, 4291 and others) that can be enforced; some by a pattern of our own.

xgrammar 0.2.9 takes a day of the month, a leap second, a leading zero or an IPv4 tail where none can stand, so those
formats are spelled out here. Left out on purpose: leap seconds, lower-case "t" and "z", IPv6 addresses that end in an
IPv4 address.
"""

from __future__ import annotations

from typing import Final

# Formats whose own rule in xgrammar 0.2.9 accepts nothing that the JSON Schema Test Suite calls invalid.
NATIVE_FORMATS: Final = (
    "duration",
    "email",
    "json-pointer",
    "relative-json-pointer",
    "uri",
    "uri-reference",
    "uri-template",
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


FORMAT_PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "ipv6": f"^{_ipv6()}$",
    "time": f"^{_TIME}$",
}
