"""`deepinfer run`: a batch file through the running engine of a cluster file, or a private one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deepinfer.batch_file import JobOptions, JobProgress, RowRunner, run_job
from deepinfer.cli.display import ProgressDisplay, summary_table
from deepinfer.cli.options import Address, Cluster, Model, Settings, Verbose, load_options, log_level
from deepinfer.config import ClusterConfig, config_fields
from deepinfer.errors import ClusterError, RankError
from deepinfer.llm import LLM
from deepinfer.log import set_up_logging
from deepinfer.models.model_digest import model_digest
from deepinfer.models.model_source import resolve_model
from deepinfer.tokenizer import Tokenizer

# Two runs that differ in one of these may answer the same row differently beyond rounding, so an output belongs to
# one set of values. The checkpoint counts by its digest.
ANSWER_SETTINGS = (
    "model.max_model_len",
    "model.prefill_truncation",
    "model.prefill_keep_tokens",
    "speculative.verifier",
    "determinism.batch_invariant",
    "kernels.numerics",
    "kernels.overrides",
)
EXIT_ROW_ERRORS = 3


def run(
    source: Annotated[
        str, typer.Option("--input", "-i", metavar="IN", help="Batch file: a path, a URL, or - for stdin.")
    ],
    target: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT", help="Output: a path, a URL, or - for stdout.")
    ],
    model: Model = None,
    cluster: Cluster = None,
    address: Address = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Replace OUT instead of going on with it.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Redo the error rows of OUT.")] = False,
    allow_row_errors: Annotated[
        bool, typer.Option("--allow-row-errors", help="Exit 0, not 3, when the job ends with error rows.")
    ] = False,
    max_in_flight: Annotated[
        int | None,
        typer.Option("--max-in-flight", min=1, metavar="N", help="Rows at the engine at a time.", show_default=False),
    ] = None,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Answer the rows of a batch file in OpenAI's format; run it again to go on after an interruption.

    Example: deepinfer run -i rows.jsonl -o answers.jsonl --model tiny
    """
    begin = time.monotonic()
    if max_in_flight is not None:
        settings = [*(settings or ()), f"scheduler.max_in_flight={max_in_flight}"]
    config = load_options(cluster, settings=settings, model=model, address=address).config
    cache_dir = Path(config.cache_dir).expanduser()
    directory = resolve_model(config.model.path, revision=config.model.revision, cache_dir=cache_dir)
    options = JobOptions(
        input=source,
        output=target,
        model=config.model.path,
        model_digest=model_digest(directory),
        settings=answer_settings(config),
        spool_directory=cache_dir / "spool",
        resume=not no_resume,
        retry_failed=retry_failed,
    )
    progress = JobProgress()
    _answer(options, config, directory, progress, attach=cluster is not None, verbose=verbose)
    table = summary_table(progress, place=target, begin=begin, end=time.monotonic())
    Console(stderr=True).print(table)
    _say_errors(progress)
    if progress.num_failed and not allow_row_errors:
        raise typer.Exit(EXIT_ROW_ERRORS)


def answer_settings(config: ClusterConfig) -> dict[str, Any]:
    """Return the fields of `config` that change answers."""
    fields = config_fields(config)
    return {path: fields[path] for path in ANSWER_SETTINGS}


def _answer(
    options: JobOptions,
    config: ClusterConfig,
    directory: Path,
    progress: JobProgress,
    *,
    attach: bool,
    verbose: bool,
) -> None:
    texts = Tokenizer.from_directory(directory)
    try:
        with ProgressDisplay(progress):
            set_up_logging(log_level(config, verbose=verbose))  # behind the bar, which takes stderr over
            run_job(options, texts=texts, start_engine=lambda: _engine(config, attach=attach), progress=progress)
    except (KeyboardInterrupt, ClusterError, RankError):
        _say_errors(progress)
        _say(f"{_rows_done(progress)}; run the same command again to go on")
        raise


@contextmanager
def _engine(config: ClusterConfig, *, attach: bool) -> Iterator[RowRunner]:
    with LLM(cluster=config, attach=attach) as llm:
        try:
            yield llm
        except KeyboardInterrupt:
            _say("stopping the engine; Ctrl-C again leaves at once")
            raise


def _rows_done(progress: JobProgress) -> str:
    total = "" if progress.num_rows is None else f" of {progress.num_rows}"
    return f"{progress.num_done}{total} rows are finished"


def _say_errors(progress: JobProgress) -> None:
    for text in progress.first_errors:
        _say(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
