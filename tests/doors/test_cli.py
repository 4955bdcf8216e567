"""The command line: exit codes, messages, progress; the engine is replaced by one that echoes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer import __version__
from deepinfer.cli import checkpoint, doctor
from deepinfer.cli import generate as generate_module
from deepinfer.cli import run as run_module
from deepinfer.cli.main import SUBCOMMANDS, run_command
from deepinfer.config import ClusterConfig
from deepinfer.errors import ClusterError
from tests.doors.batch_files import read_rows, row, write_rows
from tests.doors.echo_engine import EchoEngine

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(cache_dir))


class _Engines:
    """Stands in for the class `LLM`: hands out `engine` and keeps the configurations it was asked for."""

    def __init__(self) -> None:
        self.engine: Any = EchoEngine()
        self.configs: list[ClusterConfig] = []

    def __call__(self, *, cluster: ClusterConfig, attach: bool) -> Any:
        self.configs.append(cluster)
        self.attach = attach
        return self.engine


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> _Engines:
    fake = _Engines()
    for module in (run_module, generate_module):
        monkeypatch.setattr(module, "LLM", fake)
    return fake


def _run(source: Path, target: Path, *more: str) -> int:
    return run_command(["run", "-i", str(source), "-o", str(target), "--model", "tiny", *more])


def test_a_job_without_errors_exits_0(tmp_path: Path, engines: _Engines, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in", [row("a", "one"), row("b", "two")])
    assert _run(source, tmp_path / "out", "--set", "decode.ranks=3", "--max-in-flight", "7") == 0
    assert len(read_rows(tmp_path / "out")) == 2
    [config] = engines.configs
    assert (config.model.path, config.prefill.ranks, config.decode.ranks) == ("tiny", None, 3)
    assert config.scheduler.max_in_flight == 7
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "answered" in printed.err


def test_row_errors_exit_3_unless_allowed(
    tmp_path: Path, engines: _Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "in", [row("a", "one"), row("b", [])])
    assert _run(source, tmp_path / "out") == 3
    assert "row 'b' (line 2): prompt must hold at least one token id" in capsys.readouterr().err
    assert _run(source, tmp_path / "out") == 3  # also when all is there already
    assert len(engines.configs) == 1
    assert _run(source, tmp_path / "out", "--allow-row-errors") == 0


def test_an_engine_failure_exits_1_and_says_how_to_go_on(
    tmp_path: Path, engines: _Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """P60: the message holds the inner cause, the rows in work and those that have failed before."""

    class Dying(EchoEngine):
        def run_rows(self, rows: Any, **options: Any) -> Iterator[Any]:
            yield next(super().run_rows(rows, **options))
            raise ClusterError("decode rank 2: out of memory")

    engines.engine = Dying()
    source = write_rows(tmp_path / "in", [row("bad", []), *(row(f"r{i}", "p") for i in range(5))])
    assert _run(source, tmp_path / "out") == 1
    errors = capsys.readouterr().err
    assert "deepinfer: decode rank 2: out of memory; rows in work: 'r" in errors
    assert "row 'bad' (line 1): prompt must" in errors
    assert "2 of 6 rows are finished; run the same command again to go on" in errors
    assert "Traceback" not in errors


def test_an_interrupt_exits_130_and_the_job_goes_on(
    tmp_path: Path, engines: _Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(EchoEngine):
        def run_rows(self, rows: Any, **options: Any) -> Iterator[Any]:
            yield next(super().run_rows(rows, **options))
            raise KeyboardInterrupt

    engines.engine = Interrupted()
    source = write_rows(tmp_path / "in", [row(f"r{i}", "p") for i in range(5)])
    assert _run(source, tmp_path / "out") == 130
    errors = capsys.readouterr().err
    assert "stopping the engine" in errors
    assert "1 of 5 rows are finished; run the same command again to go on" in errors
    engines.engine = EchoEngine()
    assert _run(source, tmp_path / "out") == 0
    assert len(engines.engine.rows) == 4


USAGE_ERRORS = [
    (["run", "-i", "nowhere.jsonl", "-o", "out"], "--input: can't read nowhere.jsonl: No such file"),
    (["run", "-o", "out"], "Missing option"),
    (["run", "-i", "in", "-o", "in"], "--output: is the input file"),
    (["run", "-i", "in", "-o", "out", "--set", "decode.rank=1"], "decode.rank: unknown key; did you mean ranks?"),
    (["run", "-i", "in", "-o", "out", "--set", "decode.ranks=0"], "decode.ranks: must be above 0 and finite, not 0"),
    (["run", "-i", "in", "-o", "out", "--set", "nonsense"], "must look like section.field=value"),
    (["run", "-i", "in", "-o", "out", "--max-in-flight", "0"], "--max-in-flight"),
    (["run", "-i", "in", "-o", "out", "--cluster", "no.yaml"], "can't read the config file no.yaml"),
    (["run", "-i", "in", "-o", "out", "--set", "model=./nomodel"], "model.path: './nomodel' is no directory"),
    (["run", "-i", "in", "-o", "out", "--model", "tinny"], "owner/name of a repository; the built-in model is 'tiny'"),
    (["run", "-i", "in", "-o", "nowhere/out"], "nowhere for out; make it first"),
    (["generate", "x", "--temperature", "-1"], "temperature: -1.0 is not allowed, use a number from 0"),
    (["generate", "x", "--regex", "a", "--json-schema", "no.json"], "--json-schema: can't read no.json: No such file"),
    (["generate", "x", "--regex", "a("], "so_args"),
    (["generate", "x", "--regex", "a", "--ebnf", "in"], "only one of them can hold"),
    (["runn"], "No such command"),
    (["checkpoint", "tiny", "."], "is not an empty directory"),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE_ERRORS, ids=lambda value: str(value)[:50])
def test_usage_errors_exit_2_and_start_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engines: _Engines,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in", [row("a", "one")])
    if arguments[0] == "run" and not any("model" in argument for argument in arguments):
        arguments = [*arguments, "--model", "tiny"]
    assert run_command(arguments) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert "Traceback" not in errors
    assert not engines.configs
    assert not (tmp_path / "out").exists()


def test_an_unknown_variable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: _Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANCE", "1")
    assert _run(write_rows(tmp_path / "in", [row("a", "one")]), tmp_path / "out") == 2
    assert "did you mean DEEPINFER_BATCH_INVARIANT?" in capsys.readouterr().err


def test_another_model_under_the_same_output_exits_2(
    tmp_path: Path, engines: _Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "in", [row("a", "one")])
    assert _run(source, tmp_path / "out") == 0
    assert run_command(["checkpoint", "tiny", str(tmp_path / "other"), "--seed", "1"]) == 0
    again = ["run", "-i", str(source), "-o", str(tmp_path / "out"), "--model", str(tmp_path / "other")]
    assert run_command(again) == 2
    assert "belongs to another job (model digest" in capsys.readouterr().err
    assert _run(source, tmp_path / "out", "--set", "kernels.numerics=fp32") == 2
    assert "kernels.numerics='reference' there, 'fp32' now" in capsys.readouterr().err
    assert _run(source, tmp_path / "out", "--set", "decode.ranks=2") == 0


def test_a_fault_of_ours_is_called_one(tmp_path: Path, engines: _Engines, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(EchoEngine):
        def run_rows(self, rows: Any, **options: Any) -> Iterator[Any]:
            raise ZeroDivisionError("oh")

    engines.engine = Broken()
    source = write_rows(tmp_path / "in", [row("a", "one")])
    assert _run(source, tmp_path / "out") == 1
    assert "unexpected ZeroDivisionError: oh" in capsys.readouterr().err
    assert _run(source, tmp_path / "out", "-v") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        [], ["run"], ["generate"], ["doctor"],
        ["checkpoint"], ["checkpoint", "tiny"], ["checkpoint", "verify"],
        ["bench"], ["bench", "decode"], ["bench", "prefill"], ["bench", "scheduler"], ["bench", "offline"],
    ],
)  # fmt: skip
def test_every_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*command, "--help"]) == 0
    assert f"Example: deepinfer {' '.join(command)}".rstrip() in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"deepinfer {__version__}\n"


def test_checkpoint_tiny_is_good_and_a_broken_one_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny"
    assert run_command(["checkpoint", "tiny", str(folder)]) == 0
    assert run_command(["checkpoint", "verify", str(folder)]) == 0
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    assert run_command(["checkpoint", "verify", str(folder)]) == 3
    printed = capsys.readouterr()
    assert "model.safetensors" in printed.out
    assert printed.err.endswith("tiny: 1 deviation\n")


@pytest.mark.parametrize("command", [["doctor"], ["checkpoint", "tiny", "t"], ["checkpoint", "verify", "t"]])
def test_every_command_has_v_which_the_message_of_a_fault_names(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((doctor, "examine"), (checkpoint, "write_tiny"), (checkpoint, "verify_checkpoint")):
        monkeypatch.setattr(module, name, lambda *_, **__: 1 // 0)
    assert run_command([*command, "-v"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err.partition("Traceback")[2]


def test_doctor_names_the_source_of_every_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    assert run_command(["doctor", "--json", "--set", "decode.ranks=3"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["settings"]["accelerator"] == {"value": "cpu", "source": "DEEPINFER_ACCELERATOR"}
    assert facts["settings"]["decode.ranks"] == {"value": 3, "source": "--set"}
    assert facts["settings"]["prefill.ranks"] == {"value": 2, "source": "default"}
    assert facts["environment"]["DEEPINFER_CACHE_DIR"]["value"] == str(cache_dir)
    assert facts["kernels"]["sparse_attention"]["backend"] == "reference"
    assert run_command(["doctor"]) == 0
    assert "DEEPINFER_CACHE_DIR" in capsys.readouterr().out


_JOB = """
import sys
from deepinfer.cli import main, run
from tests.doors.echo_engine import EchoEngine
run.LLM = lambda **_: EchoEngine(delay_seconds=0.05)
main.main()
"""


def test_sigterm_stops_the_process_cleanly(tmp_path: Path) -> None:
    """SIGTERM takes the way of Ctrl-C, which the test above takes within this process."""
    source = write_rows(tmp_path / "in", [row(f"r{i}", "p") for i in range(2000)])
    command = [sys.executable, "-c", _JOB, "run", "-i", str(source), "-o", str(tmp_path / "out"), "--model", "tiny"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out").exists() or not (tmp_path / "out").stat().st_size:
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "of 2000 rows are finished; run the same command again to go on" in errors
    assert read_rows(tmp_path / "out")


def test_help_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from deepinfer.cli.main import SUBCOMMANDS, run_command; run_command(['--help']);"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(subcommand.summary[:20] in done.stdout for subcommand in SUBCOMMANDS)
