"""A batch job: rows of a file through an engine into an output that survives any death of this process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deepinfer.batch_file.bodies import AnsweredRow, AnswerWriter, TokenTexts, error_line
from deepinfer.batch_file.fields import body_field
from deepinfer.batch_file.known_ids import KnownIds
from deepinfer.batch_file.lines import InputLine, can_reread, is_url, local_path, open_input, read_lines
from deepinfer.batch_file.output import Output, open_output
from deepinfer.batch_file.rows import BatchRow, build_row, custom_id_of, decode_line
from deepinfer.errors import ClusterError, ConfigError, RequestError, shown
from deepinfer.outputs import Row, RowResult

# How many rows a message names.
_NUM_SHOWN = 5


class RowRunner(Protocol):
    """The part of `LLM` that a job needs."""

    def run_rows(self, rows: Iterable[Row], *, on_tokens: Callable[[int], None]) -> Iterator[RowResult]:
        """Yield one result per row, in finishing order; `rows` is pulled lazily, maybe from another thread.

        `on_tokens` hears, while results are taken, how many tokens have been generated since.
        """
        ...


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a job reads, writes and resumes. `settings` are those that change answers, `model` is shown in bodies."""

    input: str
    output: str
    model: str
    model_digest: str
    settings: Mapping[str, Any]
    spool_directory: Path
    resume: bool = True
    retry_failed: bool = False


@dataclass(slots=True)
class JobProgress:
    """Running totals. `num_rows` None: not known. Answered and failed rows include the `num_kept` of earlier runs.

    `num_generated_tokens` are those of rows answered in this run; `num_new_tokens` has also those of rows that are not
    finished yet. `ready_at`: time.monotonic() when the engine took its first row, None before. `first_errors`: the
    first rows that failed in this run, each with its line, custom_id and reason.
    """

    num_rows: int | None = None
    num_kept: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_new_tokens: int = 0
    ready_at: float | None = None
    first_errors: list[str] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        """Rows that have their output line."""
        return self.num_answered + self.num_failed


@dataclass(frozen=True, slots=True)
class _Pending:
    """A row at the engine."""

    batch_row: AnsweredRow
    digest: bytes
    fields: frozenset[str]


def run_job(
    options: JobOptions,
    *,
    texts: TokenTexts,
    start_engine: Callable[[], AbstractContextManager[RowRunner]],
    progress: JobProgress,
) -> None:
    """Answer every row of the input that the output lacks; `progress` is kept up to date for a watcher.

    The engine is started only when a row needs it. Raises ConfigError before anything is started, ClusterError when
    the engine fails; in both cases, and on an interrupt, what was finished is kept and the same call goes on.
    """
    if options.input != "-" and options.output != "-" and _same_file(options.input, options.output):
        raise ConfigError("is the input file; name another one", path="--output")
    if options.input != "-":
        open_input(options.input).close()  # an input that isn't there leaves no trace of an output
    output = open_output(
        options.output,
        model_digest=options.model_digest,
        settings=options.settings,
        resume=options.resume,
        spool_directory=options.spool_directory,
    )
    is_complete = False
    try:
        _Job(options, output, texts, progress).run(start_engine)
        is_complete = True
    finally:
        output.close(is_complete)


class _Job:
    def __init__(self, options: JobOptions, output: Output, texts: TokenTexts, progress: JobProgress) -> None:
        self._options = options
        self._output = output
        self._answers = AnswerWriter(output.job_id, options.model, texts)
        self._progress = progress
        self._known_ids = KnownIds()
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()  # rows are pulled and results come back in different threads

    def run(self, start_engine: Callable[[], AbstractContextManager[RowRunner]]) -> None:
        self._progress.num_rows = self._survey()
        finished = self._output.finished
        num_errors = finished.num_errors
        self._progress.num_kept = len(finished) - (num_errors if self._options.retry_failed else 0)
        self._progress.num_answered = len(finished) - num_errors
        self._progress.num_failed = self._progress.num_kept - self._progress.num_answered
        with open_input(self._options.input) as stream:
            rows = self._rows(read_lines(stream))
            first = next(rows, None)
            if first is None:
                return
            with start_engine() as engine:
                self._progress.ready_at = time.monotonic()
                try:
                    for result in engine.run_rows(itertools.chain((first,), rows), on_tokens=self._note_tokens):
                        self._finish(result)
                except ClusterError as error:
                    raise ClusterError(f"{error}{self._open_rows()}") from error
        if self._pending:
            raise ClusterError(f"the engine gave no result for some rows{self._open_rows()}; run again")

    def _survey(self) -> int | None:
        """Return the number of rows when the input can be read twice, after comparing it with the finished rows."""
        place, finished = self._options.input, self._output.finished
        if not can_reread(place):
            if len(finished):
                raise ConfigError(f"{place} can't be read twice, so it has no resume; add --no-resume", path="--input")
            return None
        if is_url(place) and not len(finished):
            return None
        num_rows, num_found = 0, 0
        with open_input(place) as stream:
            for line in read_lines(stream):
                num_rows += 1
                found = finished.find(line.number)
                if found is not None:
                    num_found += 1
                    if not finished.matches(found, line.digest):
                        raise self._other_input(f"line {line.number} differs")
        if num_found < len(finished):
            raise self._other_input(f"{len(finished) - num_found} rows are gone")
        return num_rows

    def _other_input(self, difference: str) -> ConfigError:
        message = f"{self._options.output} holds answers to another input than {self._options.input} ({difference}); "
        return ConfigError(message + "choose another output or add --no-resume", path="--output")

    def _rows(self, lines: Iterator[InputLine]) -> Iterator[Row]:
        """Yield the rows for the engine; those that are wrong get their error line at once."""
        for line in lines:
            custom_id = None
            try:
                fields = decode_line(line)
                custom_id = custom_id_of(fields)
                is_new = custom_id is None or self._known_ids.add(custom_id)
                if self._is_kept(line):
                    continue
                if not is_new:
                    message = f"custom_id {shown(custom_id)} was used on an earlier line; give every row its own"
                    raise RequestError(message, code="duplicate_custom_id", param="custom_id")
                batch_row = build_row(fields, line.number)
            except RequestError as error:
                if not self._is_kept(line):
                    self._fail(line.number, line.digest, custom_id, error)
                continue
            self._submit(batch_row, line.digest)
            yield batch_row.row

    def _open_rows(self) -> str:
        """Name the rows that the engine had, for whoever has to find the one that broke it; the oldest come first."""
        with self._lock:
            rows = [(line, self._pending[line].batch_row.custom_id) for line in sorted(self._pending)]
        if not rows:
            return ""
        names = ", ".join(f"{shown(custom_id)} (line {line})" for line, custom_id in rows[:_NUM_SHOWN])
        more = f" and {len(rows) - _NUM_SHOWN} more" if len(rows) > _NUM_SHOWN else ""
        return f"; rows in work: {names}{more}"

    def _is_kept(self, line: InputLine) -> bool:
        finished = self._output.finished
        place = finished.find(line.number)
        return place is not None and not (self._options.retry_failed and finished.is_error(place))

    def _submit(self, batch_row: BatchRow, digest: bytes) -> None:
        row = batch_row.row
        answered = AnsweredRow(batch_row.custom_id, batch_row.endpoint, row.params.logprobs)
        with self._lock:
            self._pending[row.tag] = _Pending(answered, digest, batch_row.fields)

    def _finish(self, result: RowResult) -> None:
        with self._lock:
            pending = self._pending.pop(result.tag)
        row = pending.batch_row
        if result.output.error is not None:
            error = _in_body_words(result.output.error, pending)
            self._fail(result.tag, pending.digest, row.custom_id, error)
            return
        data = self._answers.line(row, result, created=int(time.time()))
        self._output.write(result.tag, pending.digest, data)
        with self._lock:
            self._progress.num_answered += 1
            self._progress.num_prompt_tokens += len(result.output.prompt_token_ids)
            self._progress.num_generated_tokens += sum(len(output.token_ids) for output in result.output.outputs)

    def _note_tokens(self, num_tokens: int) -> None:
        self._progress.num_new_tokens += num_tokens

    def _fail(self, line: int, digest: bytes, custom_id: str | None, error: RequestError) -> None:
        self._output.write(line, digest, error_line(self._output.job_id, line, custom_id, error))
        with self._lock:
            self._progress.num_failed += 1
            if len(self._progress.first_errors) < _NUM_SHOWN:
                who = f"on line {line}" if custom_id is None else f"{shown(custom_id)} (line {line})"
                self._progress.first_errors.append(f"row {who}: {error}")


def _in_body_words(error: RequestError, pending: _Pending) -> RequestError:
    """Return `error` with the body's name of the field that it blames."""
    if error.param is None:
        return error
    name = body_field(error.param, pending.fields, pending.batch_row.endpoint)
    message = str(error)
    if message.startswith(error.param):
        message = name + message.removeprefix(error.param)
    return RequestError(message, code=error.code, param=name)


def _same_file(source: str, target: str) -> bool:
    return source == target if is_url(source) or is_url(target) else local_path(source) == local_path(target)
