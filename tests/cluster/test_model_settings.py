"""Settings that the model forbids are refused before Ray is touched, by every door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer import llm as llm_module
from deepinfer.cli.main import run_command
from deepinfer.config import load_config
from deepinfer.errors import ConfigError
from deepinfer.launcher import check_model_settings
from deepinfer.llm import LLM

TOO_SMALL = r"model.prefill_keep_tokens: 17 tokens are too few: the window of 16 .* need 28"


def test_a_kept_suffix_below_what_the_windows_need(directory: Path) -> None:
    settings = ["model=tiny", "model.prefill_keep_tokens=17"]
    with pytest.raises(ConfigError, match=TOO_SMALL):
        check_model_settings(load_config(settings=settings, environ={}).config, directory)
    for more in ("model.prefill_truncation=off", "model.prefill_keep_tokens=28"):
        check_model_settings(load_config(settings=[*settings, more], environ={}).config, directory)


def test_python_starts_no_ray_for_it(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm_module, "open_ray", None)
    with pytest.raises(ConfigError, match=TOO_SMALL):
        LLM(model=str(directory), settings={"model.prefill_keep_tokens": 17})
    rows = tmp_path / "rows.jsonl"
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    rows.write_text(json.dumps(row))
    command = ["run", "-i", str(rows), "-o", str(tmp_path / "out.jsonl"), "--model", str(directory)]
    assert run_command([*command, "--set", "model.prefill_keep_tokens=17"]) == 2
    assert "model.prefill_keep_tokens: 17 tokens are too few" in capsys.readouterr().err.replace("\n", " ")
