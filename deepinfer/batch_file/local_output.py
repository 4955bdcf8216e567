"""Durable output file of a batch job: whole lines, each row once, whatever is killed when.

Files of an output OUT: `OUT` itself, `OUT.state` (see `state.py`) and, while error rows are redone, `OUT.retry`.

* An output line's `id` is `batch_req_<job>_<line number>`; OUT alone says which rows are finished.
* Order of writing: record to OUT.state, then the line to OUT, both in single appends; a thread brings both files to the
  disk every half second. After a kill OUT ends at worst in a torn line, which the next run cuts off.
* A redone row goes to OUT.retry, so OUT keeps the old error line. At the end, or at the next start, OUT and OUT.retry
  are merged into a new file that takes OUT's place in one rename; merging twice gives the same file.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer.batch_file.state import FinishedRows, StateFile, StateHeader, settings_difference
from deepinfer.errors import ClusterError, ConfigError

SYNC_SECONDS = 0.5


class _Written(msgspec.Struct):
    """What a resume needs to know of an output line."""

    id: str
    error: msgspec.Raw


class LocalOutput:
    """A file on this machine, locked for as long as it is open."""

    def __init__(self, path: Path, *, model_digest: str, settings: Mapping[str, Any], resume: bool) -> None:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file", path="--output")
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} for {path.name}; make it first", path="--output")
        self.path = path
        self._retry_path = path.with_name(path.name + ".retry")
        self._state = StateFile(path.with_name(path.name + ".state"), output=path)
        try:
            header = self._state.read_header()
            if not resume or header is None or not _has_rows(path):
                header = self._start(header, resume, StateHeader(secrets.token_hex(4), model_digest, dict(settings)))
            elif difference := settings_difference(header, model_digest=model_digest, settings=settings):
                message = f"{path} belongs to another job ({difference}); choose another output or add --no-resume"
                raise ConfigError(message, path="--output")
            self.job_id = header.job_id
            self._merge_retries()
            lines, is_error = _scan(path, self.job_id)
            self.finished = FinishedRows(lines, is_error, self._state.read_records())
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._state.close()
            raise ConfigError(f"can't write {path}: {error.strerror}", path="--output") from error
        except BaseException:
            self._state.close()
            raise
        self._retry_file: int | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_dirty = False
        self._sync_error: OSError | None = None
        self._syncer = threading.Thread(target=self._sync_loop, name="deepinfer-sync", daemon=True)
        self._syncer.start()

    def write(self, line: int, digest: bytes, data: bytes, /) -> None:
        """Write the record, then the line: to OUT, or to OUT.retry when OUT holds an error line of this row."""
        with self._lock:
            if self._closing.is_set():
                raise ClusterError(f"{self.path} is closed; the row of line {line} is left for the next run")
            try:
                if self._sync_error is not None:
                    raise self._sync_error
                self._state.append(line, digest)
                _write_all(self._target(line), data)
            except OSError as error:
                raise write_failed(str(self.path), error) from error
            self._is_dirty = True

    def close(self, _complete: bool, /) -> None:
        """Sync, merge the redone rows, release the lock. Raises ClusterError when the disk did not take everything."""
        self._closing.set()
        self._syncer.join()
        with self._lock:
            try:
                if self._sync_error is not None:
                    raise self._sync_error
                self._sync()
                self._merge_retries()
            except OSError as error:
                raise write_failed(str(self.path), error) from error
            finally:
                os.close(self._file)
                if self._retry_file is not None:
                    os.close(self._retry_file)
                self._state.close()

    def _start(self, header: StateHeader | None, resume: bool, fresh: StateHeader) -> StateHeader:
        if resume and header is None and _has_rows(self.path):
            message = f"{self.path} exists and has no usable {self._state.path.name}, so it can't be resumed; "
            raise ConfigError(message + "choose another output or add --no-resume to replace it", path="--output")
        self._retry_path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.path, 0)
        self._state.start(fresh)
        return fresh

    def _target(self, line: int) -> int:
        if self.finished.find(line) is None:
            return self._file
        if self._retry_file is None:
            self._retry_file = os.open(self._retry_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._retry_file

    def _sync_loop(self) -> None:
        while not self._closing.wait(SYNC_SECONDS):
            try:
                self._sync()
            except OSError as error:
                self._sync_error = error
                return

    def _sync(self) -> None:
        if not self._is_dirty:
            return
        self._is_dirty = False
        self._state.sync()
        os.fsync(self._file)
        if self._retry_file is not None:
            os.fsync(self._retry_file)

    def _merge_retries(self) -> None:
        if not self._retry_path.exists():
            return
        redone, _ = _scan(self._retry_path, self.job_id)
        replaced = frozenset(redone.tolist())
        merged = self.path.with_name(self.path.name + ".merge")
        with merged.open("wb") as target:
            with self.path.open("rb") as old:
                target.writelines(
                    data for number, _, data in _written_lines(old, self.job_id) if number not in replaced
                )
            with self._retry_path.open("rb") as new:
                shutil.copyfileobj(new, target)
            target.flush()
            os.fsync(target.fileno())
        merged.replace(self.path)
        _sync_folder(self.path.parent)
        self._retry_path.unlink()


def output_id(job_id: str, line: int) -> str:
    """Return the `id` of the output line for input line `line`."""
    return f"batch_req_{job_id}_{line}"


def write_failed(place: str, error: OSError) -> ClusterError:
    """Return the error of an output that can't be written."""
    return ClusterError(f"can't write {place}: {error.strerror}; what was finished before is kept")


def _has_rows(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _scan(path: Path, job_id: str) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return line number and kind of every whole line of `path` and cut off a torn last line."""
    lines, is_error, length = array.array("Q"), array.array("b"), 0
    if path.exists():
        with path.open("rb") as file:
            for number, failed, data in _written_lines(file, job_id):
                lines.append(number)
                is_error.append(failed)
                length += len(data)
        os.truncate(path, length)
    return np.array(lines, dtype=np.uint64), np.array(is_error, dtype=np.bool_)


def _written_lines(file: BinaryIO, job_id: str) -> Iterator[tuple[int, bool, bytes]]:
    """Yield (input line number, is error, bytes) of the whole lines up to a torn last one."""
    decoder = msgspec.json.Decoder(_Written)
    prefix = output_id(job_id, 0)[:-1]
    for place, data in enumerate(file, start=1):
        if not data.endswith(b"\n"):
            return
        try:
            written = decoder.decode(data)
            if not written.id.startswith(prefix):
                raise ValueError(written.id)
            yield int(written.id.removeprefix(prefix)), bytes(written.error) != b"null", data
        except (msgspec.MsgspecError, ValueError) as error:
            message = f"line {place} of {file.name} was not written by this job; choose another output or --no-resume"
            raise ConfigError(message, path="--output") from error


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
