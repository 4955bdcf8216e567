"""Measured costs: between the entries, beyond them, and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.errors import ConfigError
from deepinfer.speculative.cost_table import CostTable, read_table, table_path, write_table

TABLE = CostTable((1, 2, 8), (0, 2, 4), ((1.0, 2.0, 6.0), (2.0, 3.0, 7.0), (8.0, 10.0, 14.0)), (0.5, 1.0, 7.0))


@pytest.mark.parametrize(
    ("sequences", "drafts", "seconds"),
    [(1, 0, 1.0), (2, 4, 7.0), (1, 1, 1.5), (1, 3, 4.0), (5, 0, 5.0), (5, 1, 5.75), (8, 9, 14.0), (16, 2, 20.0)],
)
def test_costs_between_and_beyond_entries(sequences: int, drafts: float, seconds: float) -> None:
    assert TABLE.step_seconds(sequences, drafts) == pytest.approx(seconds)


@pytest.mark.parametrize(("sequences", "seconds"), [(1, 0.5), (2, 1.0), (5, 4.0), (8, 7.0), (16, 14.0)])
def test_costs_without_drafting(sequences: int, seconds: float) -> None:
    assert TABLE.plain_step_seconds(sequences) == pytest.approx(seconds)


def test_a_table_survives_on_disk(tmp_path: Path) -> None:
    path = table_path(tmp_path, {"model": "a", "ranks": 2})
    assert read_table(path) is None
    write_table(path, TABLE)
    assert read_table(path) == TABLE
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert table_path(tmp_path, {"ranks": 2, "model": "a"}) == path
    assert table_path(tmp_path, {"ranks": 4, "model": "a"}) != path


def test_a_broken_table_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text('{"num_sequences": [1]')
    assert read_table(path) is None
    path.write_text('{"num_sequences": [1], "num_drafts": [0], "seconds": [[1.0]]}')  # of a version before
    assert read_table(path) is None


def test_a_table_that_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "step_costs").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="step_costs"):
        write_table(table_path(tmp_path, {}), TABLE)
