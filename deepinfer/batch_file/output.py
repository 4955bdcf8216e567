"""Where the rows of a batch job go: a local file, standard output or a device, a URL."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import fsspec
import numpy as np

from deepinfer.batch_file.lines import is_url, local_path
from deepinfer.batch_file.local_output import LocalOutput, write_failed
from deepinfer.batch_file.state import RECORD, FinishedRows
from deepinfer.errors import ClusterError, ConfigError


class Output(Protocol):
    """Where rows go. `finished` holds the rows of earlier runs; `write` takes a whole line, from any thread."""

    job_id: str
    finished: FinishedRows

    def write(self, line: int, digest: bytes, data: bytes, /) -> None:
        """Write the output line `data` (ends in a newline) of input line `line`."""

    def close(self, complete: bool, /) -> None:
        """Bring everything to its place; `complete` says that the job has reached its end."""


def open_output(
    place: str, *, model_digest: str, settings: Mapping[str, Any], resume: bool, spool_directory: Path
) -> Output:
    """Open the output at `place`, going on with an earlier run's unless `resume` is false.

    Raises ConfigError when another run holds it, or when it belongs to another model or other settings.
    """
    if is_url(place):
        return UrlOutput(place, spool_directory, model_digest=model_digest, settings=settings, resume=resume)
    if place == "-" or not _is_regular(local_path(place)):
        return StreamOutput(place)
    return LocalOutput(local_path(place), model_digest=model_digest, settings=settings, resume=resume)


class StreamOutput:
    """Standard output, or a device: lines are flushed one by one, there is no resume."""

    def __init__(self, place: str) -> None:
        self.job_id = secrets.token_hex(4)
        self.finished = _no_rows()
        self._place = place
        self._file: BinaryIO = sys.stdout.buffer if place == "-" else local_path(place).open("wb")

    def write(self, _line: int, _digest: bytes, data: bytes, /) -> None:
        """Write and flush the line; its number and digest aren't kept."""
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise write_failed(self._place, error) from error

    def close(self, _complete: bool, /) -> None:
        """Nothing is open that needs closing."""


class UrlOutput:
    """A URL: rows are spooled in a folder that belongs to this URL and uploaded when the job is complete.

    An interrupted job leaves its spool, so running it again on the same machine goes on where it stopped.
    """

    def __init__(
        self, url: str, spool_directory: Path, *, model_digest: str, settings: Mapping[str, Any], resume: bool
    ) -> None:
        self._url = url
        self._folder = spool_directory / hashlib.sha256(url.encode()).hexdigest()[:16]
        path = self._folder / "rows.jsonl"
        try:
            self._remote, self._remote_path = fsspec.core.url_to_fs(url)
            if resume and not path.exists() and self._remote.exists(self._remote_path):
                message = f"{url} exists and has no resume; choose another output or add --no-resume to replace it"
                raise ConfigError(message, path="--output")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"can't reach {url}: {error}", path="--output") from error
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"can't keep answers in {self._folder}: {error.strerror}", path="cache_dir") from error
        self._spool = LocalOutput(path, model_digest=model_digest, settings=settings, resume=resume)
        self.job_id = self._spool.job_id
        self.finished = self._spool.finished

    def write(self, line: int, digest: bytes, data: bytes, /) -> None:
        """Write into the spool."""
        self._spool.write(line, digest, data)

    def close(self, complete: bool, /) -> None:
        """Upload the spool and remove it when the job is complete, else leave it for the next run."""
        self._spool.close(complete)
        if not complete:
            return
        try:
            self._remote.put_file(str(self._spool.path), self._remote_path)
        except Exception as error:  # every file system has its own exceptions
            message = f"can't upload to {self._url}: {error}; the rows are in {self._spool.path}, run again to retry"
            raise ClusterError(message) from error
        shutil.rmtree(self._folder)


def _no_rows() -> FinishedRows:
    return FinishedRows(np.zeros(0, np.uint64), np.zeros(0, np.bool_), np.zeros(0, RECORD))


def _is_regular(path: Path) -> bool:
    return not path.exists() or path.is_dir() or stat.S_ISREG(path.stat().st_mode)
