"""Batch jobs of scenarios on an engine that is up already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer.batch_file import JobOptions, JobProgress, RowRunner, run_job
from deepinfer.llm import LLM
from tests.doors.batch_files import read_rows, write_rows

CHAT = "/v1/chat/completions"


def ask(llm: LLM, folder: Path, rows: list[dict[str, Any]], *, name: str = "job") -> dict[str, dict[str, Any]]:
    """Answer `rows` through the batch door, with its defaults; returns the strictly read output lines by custom_id."""
    source, target = write_rows(folder / f"{name}.in", rows), folder / f"{name}.out"
    run_source(llm, source, target)
    lines = read_rows(target)
    assert sorted(str(line["custom_id"]) for line in lines) == sorted(entry["custom_id"] for entry in rows)
    return {line["custom_id"]: line for line in lines}


def job_options(source: Path, target: Path) -> JobOptions:
    """The defaults of `deepinfer run`."""
    return JobOptions(
        input=str(source),
        output=str(target),
        model="tiny",
        model_digest="d" * 64,
        settings={},
        spool_directory=target.parent / "spool",
    )


def run_source(llm: LLM, source: Path, target: Path) -> None:
    """Run the job of the batch file `source`."""

    @contextmanager
    def running() -> Iterator[RowRunner]:
        yield llm

    run_job(job_options(source, target), texts=llm.tokenizer, start_engine=running, progress=JobProgress())


def failed(lines: dict[str, dict[str, Any]]) -> set[str]:
    """The custom_ids of error lines."""
    return {name for name, line in lines.items() if line["error"]}


def choice(line: dict[str, Any]) -> dict[str, Any]:
    """The only answer of a line."""
    found: dict[str, Any] = line["response"]["body"]["choices"][0]
    return found
