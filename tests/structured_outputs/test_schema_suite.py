"""`scripts/schema_suite.py` on cases of our own in the suite's file format."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "schema_suite.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("schema_suite", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "schema_suite", module)
    spec.loader.exec_module(module)
    return module


def _suite(folder: Path, **files: list[tuple[Any, list[tuple[Any, bool]]]]) -> Path:
    """A clone of the suite: schemas with instances and whether they are valid, by file."""
    draft = folder / "tests" / "draft2020-12"
    draft.mkdir(parents=True)
    for name, cases in files.items():
        written = [
            {
                "description": "a case",
                "schema": schema,
                "tests": [{"description": "a test", "data": value, "valid": valid} for value, valid in instances],
            }
            for schema, instances in cases
        ]
        (draft / f"{name}.json").write_text(json.dumps(written))
    return folder


def _totals(script: ModuleType, folder: Path) -> list[dict[str, int]]:
    cases = script.read_cases(folder / "tests" / "draft2020-12")
    enforcer = script.Enforcer()
    outcomes = [script.run(cases, enforcer), script.run(script.with_types(cases), enforcer)]
    return [{column: outcome.total(column) for column in script.COLUMNS} for outcome in outcomes]


def test_counts_of_what_is_refused_and_what_is_enforced(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}
    suite = _suite(
        tmp_path,
        objects=[(two, [({"b": 1, "a": 2.0}, True), ({"a": 1, "c": 1}, True), ({"b": 1}, False), ([], False)])],
        numbers=[({"minimum": 3}, [(3, True), (2, False), ("x", True)]), ({"not": {}}, [(1, False)]), (True, [])],
    )
    as_they_stand, with_types = _totals(script, suite)
    assert as_they_stand == {
        "refused": 3,
        "not compiled": 0,
        "enforced": 1,
        "valid accepted": 1,
        "valid rejected": 1,
        "invalid rejected": 2,
        "invalid accepted": 0,
    }
    assert (with_types["enforced"], with_types["valid accepted"], with_types["invalid rejected"]) == (1, 1, 1)
    assert script.main([str(suite), "--list"]) == 0
    shown = capsys.readouterr().out
    assert "refused at: minimum 1, not 1, (a whole schema) 1" in shown
    assert 'valid rejected: objects.json: {"type": "object"' in shown


def test_an_invalid_instance_that_is_taken_is_an_error(script: ModuleType, tmp_path: Path) -> None:
    """A case that lies about its instance stands for a grammar that is wrong."""
    suite = _suite(tmp_path, lies=[({"type": "integer"}, [(5, False)])])
    assert script.main([str(suite)]) == 1


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '[{"schema": {}}]'])
def test_a_folder_of_other_things_is_a_usage_error(script: ModuleType, tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit) as empty:
        script.main([str(tmp_path)])
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(SystemExit) as other:
        script.main([str(tmp_path)])
    assert (empty.value.code, other.value.code) == (2, 2)
