"""Which directory a model name stands for; the hub itself is never asked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from deepinfer.errors import ConfigError
from deepinfer.models import model_source
from deepinfer.models.model_source import resolve_model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Requests to the hub; each is answered with a directory."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def answer(repository: str, **options: Any) -> str:
        seen.append((repository, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(model_source, "snapshot_download", answer)
    return seen


def test_tiny_is_made_in_the_cache(tmp_path: Path, calls: list[Any]) -> None:
    directory = resolve_model("tiny", revision=None, cache_dir=tmp_path)
    assert directory.parent == tmp_path
    assert (directory / "config.json").exists()
    assert calls == []


def test_a_directory_is_itself(tmp_path: Path, calls: list[Any]) -> None:
    assert resolve_model(str(tmp_path), revision=None, cache_dir=tmp_path) == tmp_path
    assert calls == []


def test_a_repository_is_fetched_without_other_files(tmp_path: Path, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert resolve_model("owner/name", revision="abc", cache_dir=tmp_path) == tmp_path / "snapshot"
    ((repository, options),) = calls
    assert (repository, options["revision"]) == ("owner/name", "abc")
    assert set(options["allow_patterns"]) == {"*.json", "*.safetensors"}


@pytest.mark.parametrize("model", ["/no/such/directory", "./missing", "missing", "a/b/c"])
def test_what_is_neither(tmp_path: Path, calls: list[Any], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no directory and no owner/name") as caught:
        resolve_model(model, revision=None, cache_dir=tmp_path)
    assert caught.value.path == "model.path"
    assert calls == []


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"), revision=None, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("no snapshot\nmore"), r"not in the hub cache.*\(no snapshot\)"),
        (ConnectionError("offline"), "can't be reached"),
        (OSError("No space left on device"), "can't be downloaded: No space left"),
    ],
)
def test_hub_errors_are_config_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def refuse(repository: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(model_source, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=words):
        resolve_model("owner/name", revision=None, cache_dir=tmp_path)
