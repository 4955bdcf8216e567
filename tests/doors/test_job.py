"""A whole batch job against an engine that echoes: row errors, resume, refusals."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from deepinfer.errors import ClusterError, ConfigError
from tests.doors.batch_files import read_rows, row, run, write_rows
from tests.doors.echo_engine import MAX_OPEN, MAX_PROMPT_TOKENS, EchoEngine


def _errors(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {line["error"]["line"]: line["error"] for line in lines if line["error"]}


def _texts(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines if line["response"]}


def test_one_too_long_prompt_costs_only_its_own_row(tmp_path: Path) -> None:
    """P01: 50 prompts, number 17 too long: 49 answers and one error that names the line."""
    rows = [row(f"r{i}", "x" * (MAX_PROMPT_TOKENS * 2) if i == 17 else f"p{i}") for i in range(1, 51)]
    progress = run(write_rows(tmp_path / "in", rows), tmp_path / "out")
    lines = read_rows(tmp_path / "out")
    assert _errors(lines).keys() == {17}
    assert _errors(lines)[17]["code"] == "context_length_exceeded"
    assert _texts(lines) == {f"r{i}": f"p{i}"[::-1] for i in range(1, 51) if i != 17}
    assert (progress.num_rows, progress.num_answered, progress.num_failed) == (50, 49, 1)
    assert progress.num_new_tokens == progress.num_generated_tokens > 0


def test_prompt_lengths_around_the_limit(tmp_path: Path) -> None:
    """P02 at the door: the limit itself is answered, one more is a row error."""
    rows = [row(f"r{n}", "x" * n, max_tokens=1) for n in range(MAX_PROMPT_TOKENS - 1, MAX_PROMPT_TOKENS + 2)]
    run(write_rows(tmp_path / "in", rows), tmp_path / "out")
    assert [bool(line["error"]) for line in sorted(read_rows(tmp_path / "out"), key=lambda li: li["custom_id"])] == [
        False,
        False,
        True,
    ]


def test_empty_prompts(tmp_path: Path) -> None:
    """P03: "" and " " are answered, `[]` is a row error, an empty message list is left to the chat encoder."""
    engine = EchoEngine()
    rows = [row("a", "one"), row("b", ""), row("c", " "), row("d", []), row("e", "two")]
    rows.append(row("f", [], url="/v1/chat/completions"))
    run(write_rows(tmp_path / "in", rows), tmp_path / "out", engine)
    assert _errors(read_rows(tmp_path / "out")).keys() == {4}
    assert sorted(r.tag for r in engine.rows) == [1, 2, 3, 5, 6]


BAD_LINES = {
    "{": "invalid_json",
    "[1]": "invalid_json",
    '{"a": NaN}': "invalid_json",
    '{"custom_id": "x", "body": "\\ud800"}': "invalid_json",
    "[" * 100_000: "invalid_json",
    '{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}': "invalid_value",
    '{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {"prompt": "a"}}': "invalid_value",
    '{"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": {"prompt": "a"}}': "invalid_value",
    '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": []}': "invalid_value",
    '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {}}': "invalid_value",
    '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {}, "extra": 1}': "unknown_field",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda text: text[:40])
def test_a_bad_line_is_one_error_and_disturbs_nobody(tmp_path: Path, bad: str) -> None:
    run(write_rows(tmp_path / "in", [row("a", "one"), bad, row("b", "two")]), tmp_path / "out")
    lines = read_rows(tmp_path / "out")
    assert {line: error["code"] for line, error in _errors(lines).items()} == {2: BAD_LINES[bad]}
    assert _texts(lines) == {"a": "eno", "b": "owt"}


def test_a_repeated_custom_id_is_an_error_on_the_later_line(tmp_path: Path) -> None:
    """P07, also when the earlier line was answered by an earlier run or was itself wrong."""
    first, second = row("same", "one"), row("same", "two")
    source, target = write_rows(tmp_path / "in", [first]), tmp_path / "out"
    run(source, target)
    write_rows(source, [first, second, row("wrong", [], max_tokens=1), row("wrong", "x")])
    run(source, target)
    errors = _errors(read_rows(target))
    assert {line: error["code"] for line, error in errors.items()} == {
        2: "duplicate_custom_id",
        3: "invalid_value",
        4: "duplicate_custom_id",
    }
    assert errors[2]["param"] == "custom_id"
    assert _texts(read_rows(target)) == {"same": "eno"}


def test_crlf_byte_order_mark_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    text = (
        b"\xef\xbb\xbf" + json.dumps(row("a", "one")).encode() + b"\r\n\r\n   \r\n" + json.dumps(row("b", "x")).encode()
    )
    (tmp_path / "in").write_bytes(text)
    assert run(tmp_path / "in", tmp_path / "out").num_rows == 2
    assert {line["custom_id"]: line["id"].rsplit("_", 1)[1] for line in read_rows(tmp_path / "out")} == {
        "a": "1",
        "b": "4",
    }


def test_a_line_above_the_limit_is_a_row_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.batch_file.lines.MAX_LINE_BYTES", 200)
    run(write_rows(tmp_path / "in", [row("a", "x" * 500), row("b", "ok")]), tmp_path / "out")
    lines = read_rows(tmp_path / "out")
    assert _errors(lines)[1]["code"] == "line_too_long"
    assert _texts(lines) == {"b": "ko"}


def test_a_second_run_answers_only_what_is_missing(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in", [row(f"r{i}", f"p{i}") for i in range(20)]), tmp_path / "out"
    run(source, target)
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:12]) + lines[12][:40])  # what a kill leaves: whole lines and a torn one
    engine = EchoEngine()
    progress = run(source, target, engine)
    assert len(engine.rows) == 8
    assert progress.num_kept == 12
    assert _texts(read_rows(target)) == {f"r{i}": f"p{i}"[::-1] for i in range(20)}
    assert target.read_bytes().startswith(b"".join(lines[:12]))


def test_nothing_missing_starts_no_engine(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in", [row("a", "one"), row("b", [])]), tmp_path / "out"
    run(source, target)
    before = target.read_bytes()
    engine = EchoEngine()
    engine.run_rows = None  # type: ignore[method-assign]
    progress = run(source, target, engine)
    assert (progress.num_answered, progress.num_failed) == (1, 1)
    assert target.read_bytes() == before


def test_error_rows_are_kept_or_redone(tmp_path: Path) -> None:
    rows = [row("a", "one"), row("b", "two?"), row("c", []), row("d", "ok")]
    source, target = write_rows(tmp_path / "in", rows), tmp_path / "out"
    run(source, target, EchoEngine(fail_first_try="?"))
    assert _errors(read_rows(target)).keys() == {2, 3}
    run(source, target)
    assert _errors(read_rows(target)).keys() == {2, 3}
    engine = EchoEngine()
    progress = run(source, target, engine, retry_failed=True)
    assert [r.tag for r in engine.rows] == [2]
    assert _errors(read_rows(target)).keys() == {3}
    assert _texts(read_rows(target)) == {"a": "eno", "b": "?owt", "d": "ko"}
    assert (progress.num_answered, progress.num_failed) == (3, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out.state"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_digest": "e" * 64}, "model digest dddddddddddd there, eeeeeeeeeeee now"),
        ({"settings": {"kernels.numerics": "fp32"}}, "kernels.numerics='reference' there, 'fp32' now"),
    ],
)
def test_another_model_or_setting_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    source, target = write_rows(tmp_path / "in", [row("a", "one")]), tmp_path / "out"
    run(source, target)
    before = target.read_bytes()
    with pytest.raises(ConfigError, match=words):
        run(source, target, **changes)
    assert target.read_bytes() == before
    run(source, target, resume=False, **changes)
    assert len(read_rows(target)) == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [([row("a", "one"), row("b", "other")], "line 2 differs"), ([row("a", "one")], "1 rows are gone")],
)
def test_another_input_is_refused(tmp_path: Path, rows: list[Any], words: str) -> None:
    source, target = write_rows(tmp_path / "in", [row("a", "one"), row("b", "two")]), tmp_path / "out"
    run(source, target)
    write_rows(source, rows)
    with pytest.raises(ConfigError, match=words):
        run(source, target)


def test_a_foreign_output_is_refused(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in", [row("a", "one")]), tmp_path / "out"
    target.write_text("my diary\n")
    with pytest.raises(ConfigError, match=r"has no usable out\.state"):
        run(source, target)
    assert target.read_text() == "my diary\n"
    with pytest.raises(ConfigError, match="is the input file"):
        run(source, source)
    with pytest.raises(ConfigError, match="is a folder"):
        run(source, tmp_path)


def test_an_output_has_one_writer(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in", [row("a", "one"), row("b", "two")]), tmp_path / "out"

    class Nested(EchoEngine):
        def __enter__(self) -> EchoEngine:
            (tmp_path / "link").symlink_to(target)
            with pytest.raises(ConfigError, match="another run is writing"):
                run(source, tmp_path / "link")
            return self

    run(source, target, Nested())
    assert len(read_rows(target)) == 2


def test_an_engine_failure_keeps_what_was_finished(tmp_path: Path) -> None:
    """P60: the error names the rows that the engine had, beside the inner cause."""
    source, target = write_rows(tmp_path / "in", [row(f"r{i}", f"p{i}") for i in range(9)]), tmp_path / "out"

    class Dying(EchoEngine):
        def run_rows(self, rows: Any, **options: Any) -> Any:
            for number, result in enumerate(super().run_rows(rows, **options)):
                if number == 4:
                    raise ClusterError("decode rank 2 died")
                yield result

    with pytest.raises(ClusterError, match=r"decode rank 2 died; rows in work: ") as caught:
        run(source, target, Dying())
    assert len(read_rows(target)) == 4
    finished = {line["custom_id"] for line in read_rows(target)}
    in_work = [f"'r{i}' (line {i + 1})" for i in range(9) if f"r{i}" not in finished]
    assert str(caught.value).endswith(", ".join(in_work))
    run(source, target)
    assert len(_texts(read_rows(target))) == 9


def test_long_lists_of_rows_are_cut(tmp_path: Path) -> None:
    """P60: a user needs some ids, not a thousand."""

    class Dead(EchoEngine):
        def run_rows(self, rows: Any, **options: Any) -> Any:
            list(rows)
            raise ClusterError("gone")
            yield

    source = write_rows(tmp_path / "in", [row(f"r{i}", [] if i < 7 else "p") for i in range(30)])
    with pytest.raises(ClusterError, match=r"gone; rows in work: 'r7' \(line 8\), .*'r11' \(line 12\) and 18 more$"):
        run(source, tmp_path / "out", Dead())
    progress = run(source, tmp_path / "other")
    assert len(progress.first_errors) == 5
    assert progress.first_errors[0].startswith("row 'r0' (line 1): prompt must hold at least one token id")


def test_rows_are_pulled_only_as_the_engine_takes_them(tmp_path: Path) -> None:
    class Counting(EchoEngine):
        def run_rows(self, rows: Any, **options: Any) -> Any:
            for num_answered, result in enumerate(super().run_rows(rows, **options)):
                assert len(self.rows) <= num_answered + MAX_OPEN
                yield result

    run(write_rows(tmp_path / "in", [row(f"r{i}", "p") for i in range(50)]), tmp_path / "out", Counting())


def test_stdin_to_stdout(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    text = json.dumps(row("a", "one")) + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    buffer = sys.stdout.buffer
    assert run("-", "-").num_rows is None
    assert json.loads(buffer.getvalue())["custom_id"] == "a"  # type: ignore[attr-defined]


def test_stdin_has_no_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(write_rows(tmp_path / "in", [row("a", "one")]), tmp_path / "out")
    with pytest.raises(ConfigError, match="can't be read twice"):
        run("-", tmp_path / "out")


def test_urls_are_spooled_and_uploaded_at_the_end(tmp_path: Path) -> None:
    source, target = "memory://batch/in.jsonl", "memory://batch/out.jsonl"
    store = fsspec.filesystem("memory")
    store.pipe("/batch/in.jsonl", b"".join(json.dumps(row(f"r{i}", f"p{i}")).encode() + b"\n" for i in range(5)))
    spool = {"spool_directory": tmp_path}

    class Dying(EchoEngine):
        def run_rows(self, rows: Any, **options: Any) -> Any:
            yield from [next(super().run_rows(rows, **options))]
            assert not store.exists("/batch/out.jsonl")
            raise ClusterError("gone")

    try:
        with pytest.raises(ClusterError):
            run(source, target, Dying(), **spool)
        engine = EchoEngine()
        run(source, target, engine, **spool)
        assert len(engine.rows) == 4
        (tmp_path / "copy").write_bytes(store.cat("/batch/out.jsonl"))
        assert len(_texts(read_rows(tmp_path / "copy"))) == 5
        with pytest.raises(ConfigError, match="exists and has no resume"):
            run(source, target, **spool)
        run(source, target, resume=False, **spool)
        assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    finally:
        store.rm("/batch", recursive=True)


@pytest.mark.parametrize("place", ["/nowhere/in", "nosuch://x/y", "memory://nowhere/x"])
def test_an_input_that_cannot_be_read_is_named(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        run(place, tmp_path / "out")


def test_an_output_or_a_spool_that_can_not_be_written_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, *arguments: Any) -> int:
        if Path(path).name == "out":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *arguments)

    source, engine = write_rows(tmp_path / "in", [row("a", "one")]), EchoEngine()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"--output: can't write .*out: Permission denied"):
        run(source, tmp_path / "out", engine)
    with pytest.raises(ConfigError, match=r"cache_dir: can't keep answers in .*: Not a directory"):
        run(source, "memory://rows/out", engine, spool_directory=source / "spool")
    assert not engine.rows
