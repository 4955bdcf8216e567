"""`scripts/check_determinism.py`: its comparison and verdict with engines made to differ, and the real one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepinfer.errors import ClusterError, ConfigError, RequestError
from deepinfer.outputs import CompletionOutput, RequestOutput

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_determinism.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_determinism", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_determinism", module)
    spec.loader.exec_module(module)
    return module


class FakeLLM:
    """Answers from the prompt alone; `fault` may spoil the answer of a row by what else it is told."""

    num_drafts = 0

    def __init__(self, model: str | None, cluster: str | None, *, settings: Mapping[str, object]) -> None:
        drafts = settings.get("speculative.max_draft_tokens", self.num_drafts)
        self.config = SimpleNamespace(speculative=SimpleNamespace(max_draft_tokens=drafts))
        self.settings = settings

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate_iter(self, rows: list[Any], *, max_in_flight: int | None = None) -> Iterator[RequestOutput]:
        for place, row in reversed(list(enumerate(rows))):
            count = row["params"].max_tokens
            ids = [(len(row["prompt"]) + step) % 97 for step in range(count)]
            logprobs = [{token: -0.5 * step, 98: -3.0} for step, token in enumerate(ids)]
            sequence = CompletionOutput(0, token_ids=ids, logprobs=logprobs)
            self.spoil(sequence, row["tag"], place, len(rows) if max_in_flight is None else 1)
            yield RequestOutput("x", outputs=[sequence], tag=row["tag"])

    def spoil(self, sequence: CompletionOutput, row: int, place: int, num_rows: int) -> None:
        pass


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, engine: type, *arguments: str) -> int:
    monkeypatch.setattr(script, "LLM", engine)
    monkeypatch.setattr(sys, "argv", ["check_determinism.py", "--rows", "6", "--max-tokens", "5", *arguments])
    code: int = script.main()
    return code


def test_equal_answers(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo words\n", encoding="utf-8")
    assert run(script, monkeypatch, FakeLLM, "-i", str(prompts)) == 0
    printed = capsys.readouterr().out
    assert "deterministic: all bits are equal" in printed
    together = next(line for line in printed.splitlines() if "together" in line)
    assert together.split("│")[2].strip() == "2"
    assert "drafts" not in printed


def test_one_changed_bit_of_a_logprob_is_found_and_located(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P32: equal tokens are not enough."""

    class Crowded(FakeLLM):
        def spoil(self, sequence: CompletionOutput, row: int, place: int, num_rows: int) -> None:
            if num_rows > 6 and row in (2, 4):
                assert sequence.logprobs is not None
                sequence.logprobs[3][98] = -3.0000002384185791  # the next float32

    assert run(script, monkeypatch, Crowded) == 3
    lines = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.count("│") > 3}
    assert [cell.strip() for cell in lines["in a crowd"].split("│")[2:5]] == ["6", "2", "row 2, position 3: logprob"]
    assert [cell.strip() for cell in lines["shuffled"].split("│")[2:4]] == ["6", "0"]


def test_drafts_are_switched_off_on_a_second_engine(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Drafting(FakeLLM):
        num_drafts = 5

        def spoil(self, sequence: CompletionOutput, row: int, place: int, num_rows: int) -> None:
            if not self.config.speculative.max_draft_tokens:
                sequence.token_ids[-1] += 1
            assert self.settings["determinism.batch_invariant"] is True

    assert run(script, monkeypatch, Drafting) == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "position" in line]
    assert len(lines) == 1
    assert "without drafts" in lines[0]
    assert "row 0, position 4: token" in lines[0]


def test_answers_of_other_lengths_differ(script: ModuleType) -> None:
    long = script.Answer((1, 2), (((1, 0.0),), ((2, 0.0),)))
    short = script.Answer((1,), (((1, 0.0),),))
    assert script.first_difference([long, long], [long, short]) == (1, script.Difference(1, 1, "length"))


def test_errors_have_their_exit_codes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: Exception) -> type:
        class Failing(FakeLLM):
            def __init__(self, *_: object, settings: Mapping[str, object]) -> None:
                raise error

        return Failing

    assert run(script, monkeypatch, failing(ConfigError("bad", path="decode.ranks"))) == 2
    assert "decode.ranks" in capsys.readouterr().err
    assert run(script, monkeypatch, failing(ClusterError("gone"))) == 1
    with pytest.raises(SystemExit) as missing:
        run(script, monkeypatch, FakeLLM, "-i", "no-such-file")
    assert missing.value.code == 2

    class Refusing(FakeLLM):
        def generate_iter(self, rows: list[Any], *, max_in_flight: int | None = None) -> Iterator[RequestOutput]:
            yield RequestOutput("x", tag=3, error=RequestError("too long", param="prompt"))

    with pytest.raises(SystemExit, match=r"row 3 failed.*too long"):
        run(script, monkeypatch, Refusing)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tiny_model_on_a_real_engine(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", "tiny", "--rows", "4", "--max-tokens", "4"]
    for setting in ("prefill.ranks=1", "decode.ranks=2", "decode.max_running=4", "ray.object_store_bytes=125829120"):
        command += ["--set", setting]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    environment["DEEPINFER_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "deterministic: all bits are equal" in done.stdout
    assert "without drafts" in done.stdout
