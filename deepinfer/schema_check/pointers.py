"""JSON pointers (RFC 6901) as tuples of names, and references of one schema into itself."""

from __future__ import annotations

from typing import TypeAlias
from urllib.parse import unquote

Pointer: TypeAlias = tuple[str, ...]


def child(pointer: Pointer, name: str) -> Pointer:
    """Return the pointer to the entry `name` of what `pointer` points to."""
    return (*pointer, name)


def show_pointer(pointer: Pointer) -> str:
    """Return the pointer as a URI fragment: "#" is the whole document."""
    return "#" + "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in pointer)


def parse_reference(value: object) -> Pointer | None:
    """Return where a `$ref` points to within its own document, None for anything else."""
    if value == "#":
        return ()
    if not isinstance(value, str) or not value.startswith("#/"):
        return None
    return tuple(unquote(name).replace("~1", "/").replace("~0", "~") for name in value[2:].split("/"))
