"""`OUT.state`: what the rows of an output were, so that a later run can go on with the same job and no other.

Format (little-endian): 8 bytes `DIBATCH1`; uint32 length and uint32 CRC-32 of the header; the header as JSON; then one
record of 24 bytes per written row: uint64 line number, 16-byte digest of the input line. A record is written before
its output line, so every output line has a record; a record without an output line means nothing. A torn record at the
end is cut off. The file is never replaced, because the lock of a run hangs on it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError

_MAGIC = b"DIBATCH1"
_PREFIX = struct.Struct("<8sII")
RECORD = np.dtype([("line", "<u8"), ("digest", "<u8", (2,))])


class StateHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job: its random id, the model's digest and the settings that change answers."""

    job_id: str
    model_digest: str
    settings: dict[str, Any]


class StateFile:
    """The open, locked state file of one output. Raises ConfigError when another process holds the lock."""

    def __init__(self, path: Path, *, output: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"can't write {path}: {error.strerror}", path="--output") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            message = f"another run is writing {output}; wait for it to end or choose another output"
            raise ConfigError(message, path="--output") from error

    def read_header(self) -> StateHeader | None:
        """Return the header, None when the file is empty or was cut inside its header."""
        prefix = os.pread(self._file, _PREFIX.size, 0)
        if len(prefix) < _PREFIX.size:
            return None
        magic, length, checksum = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            raise ConfigError(f"{self.path} is no state file of this version; move it away", path="--output")
        data = os.pread(self._file, length, _PREFIX.size)
        if len(data) < length or zlib.crc32(data) != checksum:
            return None
        return msgspec.json.decode(data, type=StateHeader)

    def start(self, header: StateHeader) -> None:
        """Empty the file and write `header`, on the disk when this returns."""
        os.ftruncate(self._file, 0)
        data = msgspec.json.encode(header)
        os.write(self._file, _PREFIX.pack(_MAGIC, len(data), zlib.crc32(data)) + data)
        os.fsync(self._file)

    def read_records(self) -> NDArray[np.void]:
        """Return all records (dtype `RECORD`), in the order of writing, and cut off a torn one."""
        _, length, _ = _PREFIX.unpack(os.pread(self._file, _PREFIX.size, 0))
        begin = _PREFIX.size + length
        count = (os.fstat(self._file).st_size - begin) // RECORD.itemsize
        os.ftruncate(self._file, begin + count * RECORD.itemsize)
        return np.fromfile(self.path, dtype=RECORD, count=count, offset=begin)

    def append(self, line: int, digest: bytes) -> None:
        """Add the record of a row that is about to be written."""
        os.write(self._file, line.to_bytes(8, "little") + digest)

    def sync(self) -> None:
        """Bring the records to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Release the lock and close."""
        os.close(self._file)


def settings_difference(header: StateHeader, *, model_digest: str, settings: Mapping[str, Any]) -> str | None:
    """Say in words how the job in `header` differs from this one; None when they are the same."""
    parts = []
    if header.model_digest != model_digest:
        parts.append(f"model digest {header.model_digest[:12]} there, {model_digest[:12]} now")
    for name in sorted({*header.settings, *settings}):
        before, now = header.settings.get(name), settings.get(name)
        if before != now:
            parts.append(f"{name}={before!r} there, {now!r} now")
    return "; ".join(parts) or None


class FinishedRows:
    """The rows that an output already holds: 16 bytes a row in memory, looked up by line number.

    A row whose record is missing (possible after a loss of power only) matches any input line.
    """

    def __init__(self, lines: NDArray[np.uint64], is_error: NDArray[np.bool_], records: NDArray[np.void]) -> None:
        order = lines.argsort(kind="stable")
        self._keys = (lines[order] << np.uint64(1)) | is_error[order].astype(np.uint64)
        self._checks = np.zeros(len(lines), dtype=np.uint64)
        places = self._keys_place(records["line"])
        known = places < len(lines)
        known[known] &= (self._keys[places[known]] >> np.uint64(1)) == records["line"][known]
        folded = records["digest"][:, 0] ^ records["digest"][:, 1]
        self._checks[places[known]] = folded[known]

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_errors(self) -> int:
        """How many of the rows are error rows."""
        return int((self._keys & np.uint64(1)).sum())

    @property
    def last_line(self) -> int:
        """The highest line number, 0 when there is none."""
        return int(self._keys[-1] >> np.uint64(1)) if len(self._keys) else 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._keys.nbytes + self._checks.nbytes

    def find(self, line: int) -> int | None:
        """Return the place of `line`, None when it isn't finished."""
        place = int(self._keys_place(np.uint64(line)))
        return place if place < len(self._keys) and int(self._keys[place]) >> 1 == line else None

    def is_error(self, place: int) -> bool:
        """Say whether the row at `place` is an error row."""
        return bool(int(self._keys[place]) & 1)

    def matches(self, place: int, digest: bytes) -> bool:
        """Say whether the row at `place` came from the input line with `digest`."""
        folded = int.from_bytes(digest[:8], "little") ^ int.from_bytes(digest[8:], "little")
        return int(self._checks[place]) in (0, folded)

    def _keys_place(self, line: Any) -> Any:
        return self._keys.searchsorted(line << np.uint64(1))
