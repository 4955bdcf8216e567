"""Lazy reading of the input: a local path, a URL that fsspec opens, or `-` for stdin."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import fsspec

from deepinfer.errors import ConfigError

MAX_LINE_BYTES = 64 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SKIP_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class InputLine:
    """One non-blank line: its number (from 1, blank lines counted), its bytes without white space at both ends.

    `digest` is a 16-byte BLAKE2b of the line, which holds the custom_id and the body. A line above `MAX_LINE_BYTES` has
    `is_too_long` set and only its first bytes in `data`; its digest covers all of it.
    """

    number: int
    data: bytes
    digest: bytes
    is_too_long: bool = False


def is_url(place: str) -> bool:
    """Say whether `place` goes through fsspec; `file://` URLs are local paths (see `local_path`)."""
    return "://" in place and not place.startswith("file://")


def local_path(place: str) -> Path:
    """Return the absolute path of a local `place`, links resolved so that two names of one file meet."""
    return Path(place.removeprefix("file://")).expanduser().resolve()


def can_reread(place: str) -> bool:
    """Say whether the input can be read from its beginning a second time, which a resume needs."""
    return place != "-" and (is_url(place) or local_path(place).is_file())


def open_input(place: str) -> BinaryIO:
    """Open the input for reading bytes. Raises ConfigError naming the place and the reason."""
    if place == "-":
        return sys.stdin.buffer
    try:
        if not is_url(place):
            return local_path(place).open("rb")
        stream = fsspec.open(place, "rb").open()
    except (OSError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"can't read {place}: {reason}", path="--input") from error
    return stream if isinstance(stream, io.BytesIO) else cast("BinaryIO", io.BufferedReader(stream, _SKIP_BYTES))


def read_lines(stream: BinaryIO) -> Iterator[InputLine]:
    """Yield the non-blank lines of `stream`; memory is bounded by the longest line and `MAX_LINE_BYTES`."""
    number = 0
    while data := stream.readline(MAX_LINE_BYTES):
        number += 1
        if number == 1:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if len(data) >= MAX_LINE_BYTES and not data.endswith(b"\n"):
            yield _too_long(stream, number, data)
            continue
        data = data.strip()
        if data:
            yield InputLine(number, data, hashlib.blake2b(data, digest_size=16).digest())


def _too_long(stream: BinaryIO, number: int, data: bytes) -> InputLine:
    digest = hashlib.blake2b(data, digest_size=16)
    head = data[:1024]
    while not data.endswith(b"\n") and (data := stream.readline(_SKIP_BYTES)):
        digest.update(data)
    return InputLine(number, head, digest.digest(), is_too_long=True)
