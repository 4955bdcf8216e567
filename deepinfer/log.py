"""Log lines with role and rank in front, so that 68 processes can be told apart."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_FORMAT = "%(asctime)s %(levelname).1s %(name)s] %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the package's logger for `name`, for example "decode-3" or "driver"."""
    return logging.getLogger(f"deepinfer.{name}")


def set_up_logging(level: str) -> None:
    """Send this process's log lines of the package to stderr from `level` ("debug", "info", ...) on."""
    logger = logging.getLogger("deepinfer")
    logger.setLevel(level.upper())
    logger.propagate = False
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
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
