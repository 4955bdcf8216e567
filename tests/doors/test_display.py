"""What a running job shows."""

from __future__ import annotations

import io
import time

from rich.console import Console

from deepinfer.batch_file import JobProgress
from deepinfer.cli.display import ProgressDisplay, duration, summary_table


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    progress = JobProgress(num_rows=10, ready_at=0.0)
    with ProgressDisplay(progress, stream=stream, line_seconds=0.01):
        deadline = time.monotonic() + 10
        while stream.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            progress.num_answered = min(progress.num_answered + 1, 8)
            progress.num_failed = 1
            time.sleep(0.005)
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("rows ")
    assert "/10 (1 failed), prompt 0 tokens/s, generated 0 tokens/s" in last


def test_tokens_of_rows_that_are_not_finished_count_in_the_rate() -> None:
    stream = io.StringIO()
    progress = JobProgress(num_rows=10, ready_at=0.0)
    with ProgressDisplay(progress, stream=stream, line_seconds=0.01):
        deadline = time.monotonic() + 10
        while stream.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            progress.num_new_tokens += 1_000_000
            time.sleep(0.005)
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("rows 0/10")
    assert "generated 0 tokens/s" not in last


def test_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with ProgressDisplay(JobProgress(num_rows=3, num_answered=1), stream=stream):
        deadline = time.monotonic() + 10
        while "rows 1/3" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "rows 1/3 (0 failed)" in stream.getvalue()


def test_nothing_is_written_while_the_engine_starts() -> None:
    stream = io.StringIO()
    with ProgressDisplay(JobProgress(num_rows=10), stream=stream, line_seconds=0.001):
        time.sleep(0.05)
    assert stream.getvalue() == ""


def test_summary_and_duration() -> None:
    console = Console(file=io.StringIO(), width=100)
    progress = JobProgress(
        num_rows=5, num_answered=4, num_failed=1, num_kept=2, num_generated_tokens=1500, ready_at=7.0
    )
    console.print(summary_table(progress, place="out.jsonl", begin=2.0, end=10.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    wanted = ("answered", "from earlier runs", "0:00:08", "0:00:05", "500.0", "out.jsonl")
    assert [words for words in wanted if words not in text] == []
    assert duration(3725.4) == "1:02:05"
