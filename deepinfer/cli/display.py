"""What a running job shows on stderr: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from deepinfer.batch_file import JobProgress

_REFRESH_SECONDS = 0.5
_LINE_SECONDS = 5.0
_WINDOW_SECONDS = 15.0


class ProgressDisplay:
    """Shows `progress` from a thread of its own while the `with` block runs."""

    def __init__(
        self, progress: JobProgress, *, stream: TextIO | None = None, line_seconds: float = _LINE_SECONDS
    ) -> None:
        self._progress = progress
        self._stream = stream or sys.stderr
        self._line_seconds = line_seconds
        self._samples: deque[tuple[float, int, int, int]] = deque()
        self._ending = threading.Event()
        self._bar = self._make_bar() if self._stream.isatty() else None
        work = self._write_lines if self._bar is None else partial(self._move_bar, self._bar)
        self._thread = threading.Thread(target=work, name="deepinfer-display", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        """Start to show; on a terminal, what is logged from now on appears above the bar."""
        if self._bar is not None:
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ending.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def _make_bar(self) -> Progress:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.fields[rows]}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        console = Console(file=self._stream)
        return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, auto_refresh=False)

    def _write_lines(self) -> None:
        """Write lines once the engine is up; while it starts, it logs its own."""
        while not self._ending.wait(self._line_seconds):
            if self._progress.ready_at is not None:
                print(f"{self._rows_text()}, {self._figures()}", file=self._stream, flush=True)

    def _move_bar(self, bar: Progress) -> None:
        task = bar.add_task("", total=None, rows="", figures="")
        while not self._ending.wait(_REFRESH_SECONDS):
            bar.update(
                task,
                total=self._progress.num_rows,
                completed=self._progress.num_done,
                rows=self._rows_text(),
                figures=self._figures(),
            )
            bar.refresh()

    def _rows_text(self) -> str:
        total = "" if self._progress.num_rows is None else f"/{self._progress.num_rows}"
        return f"rows {self._progress.num_done}{total} ({self._progress.num_failed} failed)"

    def _figures(self) -> str:
        rows_rate, prompt_rate, generated_rate = self._rates()
        text = f"prompt {prompt_rate:,.0f} tokens/s, generated {generated_rate:,.0f} tokens/s"
        if self._progress.num_rows is None or rows_rate <= 0:
            return text
        left = (self._progress.num_rows - self._progress.num_done) / rows_rate
        return f"{text}, ETA {duration(left)}"

    def _rates(self) -> tuple[float, float, float]:
        """Return rows, prompt tokens and generated tokens per second over the last seconds."""
        progress = self._progress
        now = (time.monotonic(), progress.num_done, progress.num_prompt_tokens, progress.num_new_tokens)
        self._samples.append(now)
        while now[0] - self._samples[0][0] > _WINDOW_SECONDS and len(self._samples) > 2:
            self._samples.popleft()
        then = self._samples[0]
        seconds = max(now[0] - then[0], 1e-9)
        return (now[1] - then[1]) / seconds, (now[2] - then[2]) / seconds, (now[3] - then[3]) / seconds


def summary_table(progress: JobProgress, *, place: str, begin: float, end: float) -> Table:
    """Return the table that ends a job; `begin` and `end` are values of time.monotonic()."""
    table = Table(show_header=False, title="batch job", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    total = progress.num_done if progress.num_rows is None else progress.num_rows
    table.add_row("rows", f"{total:,}")
    table.add_row("answered", f"{progress.num_answered:,}")
    table.add_row("failed", f"{progress.num_failed:,}")
    if progress.num_kept:
        table.add_row("of these from earlier runs", f"{progress.num_kept:,}")
    table.add_row("prompt tokens", f"{progress.num_prompt_tokens:,}")
    table.add_row("generated tokens", f"{progress.num_generated_tokens:,}")
    table.add_row("time", duration(end - begin))
    if progress.ready_at is not None:
        table.add_row("of this starting the engine", duration(progress.ready_at - begin))
        rate = progress.num_generated_tokens / max(end - progress.ready_at, 1e-9)
        table.add_row("generated tokens/s after that", f"{rate:,.1f}")
    table.add_row("output", place)
    return table


def duration(seconds: float) -> str:
    """Return `seconds` as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
