"""Making and reading batch files in tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer.batch_file import JobOptions, JobProgress, run_job
from tests.doors.echo_engine import EchoEngine, EchoTexts


def row(custom_id: str, prompt: Any, *, url: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    key = "messages" if url == "/v1/chat/completions" else "prompt"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {key: prompt, **fields}}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The output lines, read as a strict reader does: whole lines, no NaN, exactly one of answer and error."""
    lines = []
    for text in path.read_bytes().decode("utf-8").splitlines(keepends=True):
        assert text.endswith("\n")
        line = json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
        assert list(line) == ["id", "custom_id", "response", "error"]
        assert (line["response"] is None) != (line["error"] is None)
        if line["error"] is not None:
            assert list(line["error"]) == ["code", "message", "param", "line"]
        else:
            assert line["response"]["status_code"] == 200
        lines.append(line)
    return lines


def run(source: Path | str, target: Path | str, engine: EchoEngine | None = None, **changes: Any) -> JobProgress:
    options = {
        "input": str(source),
        "output": str(target),
        "model": "echo",
        "model_digest": "d" * 64,
        "settings": {"kernels.numerics": "reference"},
        "spool_directory": Path("spool"),
    } | changes
    progress = JobProgress()
    engine = engine or EchoEngine()
    run_job(JobOptions(**options), texts=EchoTexts(), start_engine=lambda: engine, progress=progress)
    return progress
