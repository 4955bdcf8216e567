"""Compact books of a job: seen ids, and the state file's records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from deepinfer.batch_file import known_ids
from deepinfer.batch_file.known_ids import KnownIds
from deepinfer.batch_file.state import RECORD, FinishedRows, StateFile, StateHeader
from deepinfer.errors import ConfigError


def test_known_ids_find_every_repeat_in_eight_bytes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_ids, "_RECENT", 64)
    ids = KnownIds()
    assert all(ids.add(f"row-{i}") for i in range(5_000))
    assert not any(ids.add(f"row-{i}") for i in range(5_000))
    assert ids.add("row-5000")
    assert ids.num_bytes <= 8 * 5_001


def test_a_state_file_keeps_header_and_records(tmp_path: Path) -> None:
    header = StateHeader("job", "digest", {"a.b": 1.5, "c": None})
    state = StateFile(tmp_path / "s", output=tmp_path / "o")
    assert state.read_header() is None
    state.start(header)
    state.append(3, bytes(range(16)))
    state.close()
    size = (tmp_path / "s").stat().st_size
    with (tmp_path / "s").open("ab") as file:
        file.write(b"torn")
    again = StateFile(tmp_path / "s", output=tmp_path / "o")
    assert again.read_header() == header
    records = again.read_records()
    assert [int(line) for line in records["line"]] == [3]
    assert records["digest"].tobytes() == bytes(range(16))
    assert (tmp_path / "s").stat().st_size == size
    assert RECORD.itemsize <= 40
    with pytest.raises(ConfigError, match="another run is writing"):
        StateFile(tmp_path / "s", output=tmp_path / "o")
    again.close()


@pytest.mark.parametrize("keep", [4, 20])
def test_a_state_file_cut_in_its_header_counts_as_empty(tmp_path: Path, keep: int) -> None:
    state = StateFile(tmp_path / "s", output=tmp_path / "o")
    state.start(StateHeader("job", "digest", {}))
    state.close()
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:keep])
    assert StateFile(tmp_path / "s", output=tmp_path / "o").read_header() is None


def test_a_foreign_state_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"something else, longer than a prefix")
    with pytest.raises(ConfigError, match="no state file of this version"):
        StateFile(tmp_path / "s", output=tmp_path / "o").read_header()


def test_finished_rows_are_looked_up_by_line() -> None:
    records = np.zeros(3, dtype=RECORD)
    for place, (line, digest) in enumerate([(9, b"a" * 16), (4, b"b" * 8 + b"c" * 8), (5, b"d" * 16)]):
        records[place] = (line, np.frombuffer(digest, dtype="<u8"))
    rows = FinishedRows(np.array([9, 4, 70], np.uint64), np.array([False, True, False]), records)
    assert [rows.find(line) is not None for line in (3, 4, 5, 9, 70, 71)] == [False, True, False, True, True, False]
    four = rows.find(4)
    assert four is not None
    assert rows.is_error(four)
    assert rows.matches(four, b"b" * 8 + b"c" * 8)
    assert not rows.matches(four, b"b" * 8 + b"d" * 8)
    seventy = rows.find(70)
    assert seventy is not None
    assert rows.matches(seventy, b"x" * 16)  # no record: nothing to compare with
    assert (len(rows), rows.num_errors, rows.num_bytes) == (3, 1, 48)


def test_header_is_plain_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(StateHeader("j", "d", {"x": 1}))) == {
        "job_id": "j",
        "model_digest": "d",
        "settings": {"x": 1},
    }
