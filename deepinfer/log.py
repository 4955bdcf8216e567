"""Log lines that say which process speaks, and of which step and request: 68 processes have to be told apart.

A line is `time level origin] message | key=value ...`. The origin is the process ("decode-3", "driver") with the part
of it that speaks, or that part alone in a user's own process. The keys are those of `about`, in its order.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_ROOT = "deepinfer"
_FORMAT = "%(asctime)s %(levelname).1s %(origin)s] %(message)s%(fields)s"
_FIELDS = ("step", "request", "row")
# Ids that a user gave may have any length and hold anything.
_MAX_VALUE = 200
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/")


class LineFormatter(logging.Formatter):
    """Writes the lines of one process; `process` is None for one that is neither a rank nor the driver."""

    def __init__(self, process: str | None = None) -> None:
        super().__init__(_FORMAT, datefmt="%H:%M:%S")
        self._process = process

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name in the standard library)
        """Return the line without what Python adds of an exception."""
        part = record.name.removeprefix(f"{_ROOT}.")
        record.origin = " ".join(dict.fromkeys((self._process, part))) if self._process else record.name
        fields = [f"{name}={_value(record, name)}" for name in _FIELDS if getattr(record, name, None) is not None]
        record.fields = f" | {' '.join(fields)}" if fields else ""
        return super().formatMessage(record)


def get_logger(name: str) -> logging.Logger:
    """Return the package's logger for `name`, for example "decode-3" or "driver"."""
    return logging.getLogger(f"{_ROOT}.{name}")


def about(*, step: int | None = None, request: str | None = None, row: str | None = None) -> dict[str, object]:
    """Return what a line is about, for `extra` of a log call: `row` is what the user calls the request."""
    return {"step": step, "request": request, "row": row or None}


def set_up_logging(level: str, *, process: str | None = None) -> None:
    """Send this process's log lines of the package to stderr from `level` ("debug", "info", ...) on."""
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level.upper())
    logger.propagate = False
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    logger.addHandler(handler)


@contextmanager
def phase(logger: logging.Logger, name: str) -> Iterator[None]:
    """Log the begin, the end and the seconds of a start phase; a silent start can't be told from a hung one."""
    begin = time.monotonic()
    logger.info("%s: begin", name)
    try:
        yield
    except BaseException:
        logger.error("%s: failed after %.1f s", name, time.monotonic() - begin)
        raise
    logger.info("%s: done in %.1f s", name, time.monotonic() - begin)


def _value(record: logging.LogRecord, name: str) -> str:
    text = str(getattr(record, name))
    text = text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
    return text if text and _PLAIN.issuperset(text) else json.dumps(text)
