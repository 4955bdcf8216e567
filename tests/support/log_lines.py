"""The log lines of a process, as they would be written, while a `with` block runs."""

from __future__ import annotations

import logging

from deepinfer.log import LineFormatter, get_logger


class LogLines(logging.Handler):
    """Keeps in `lines` what the logger `origin` says."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.setFormatter(LineFormatter(origin))
        self._logger = get_logger(origin)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def __enter__(self) -> LogLines:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
