"""`deepinfer doctor` on machines with and without GPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.cli import doctor as command
from deepinfer.cli.doctor import examine
from deepinfer.cli.main import run_command
from deepinfer.config import LoadedConfig, load_config, resolve
from deepinfer.kernels import registry
from deepinfer.kernels.registry import op_names
from deepinfer.platforms import devices


def facts_of(accelerator: str, *settings: str) -> dict[str, dict[str, Any]]:
    loaded = load_config(settings=settings, environ={})
    return examine(LoadedConfig(resolve(loaded.config, accelerator=accelerator), loaded.sources))


def test_a_cpu_has_the_reference_for_every_op_and_says_that_there_is_no_gpu() -> None:
    facts = facts_of("cpu")
    assert set(facts["kernels"]) == set(op_names())
    assert {entry["backend"] for entry in facts["kernels"].values()} == {"reference"}
    assert all(entry["verified_here"] for entry in facts["kernels"].values())
    assert facts["kernel backends"] == {"reference": "usable"}
    assert facts["accelerators"]["gpus"] == "none that torch can use"
    assert "packages that are not used" not in facts


def test_kernels_of_a_gpu_are_not_guessed_on_a_machine_without_one() -> None:
    assert list(facts_of("nvidia")["kernels"]) == ["not chosen"]


def test_a_gpu_shows_what_serves_each_op_and_why_a_backend_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(registry, "_chip", lambda device_type: "sm_100")
    monkeypatch.setattr(command, "describe_devices", lambda: ["Some GPU, sm_100, 180 GiB"])
    backends = {**registry._BACKENDS, "flash_mla": ("no_such_package",)}
    monkeypatch.setattr(registry, "_BACKENDS", backends)
    facts = facts_of("nvidia")
    norm = {"backend": "triton", "package": "triton", "batch_invariant": True}
    assert facts["kernels"]["rms_norm"] == norm | {"verified_chips": ["sm_90"], "verified_here": False}
    assert facts["kernels"]["linear"]["batch_invariant"] is False
    assert facts["kernel backends"]["triton"] == "usable"
    text = facts["kernel backends"]["flash_mla"]
    assert "No module named 'no_such_package'" in text
    assert "slower" in text
    assert facts["accelerators"]["gpu 0"] == "Some GPU, sm_100, 180 GiB"
    unused = facts["packages that are not used"]
    assert unused.keys() == {"tilelang", "tile-kernels", "deepselect"}
    assert facts["optional packages"]["DeepEP"].startswith("not installed; carries rows between ranks in several hosts")
    assert run_command(["doctor", "--set", "accelerator=nvidia"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  rms_norm"))
    assert line.split(maxsplit=3)[3] == "batch-invariant      verified on sm_90, NOT on this chip"


def test_deep_ep_is_found_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_version", lambda name: {"deep_ep": "2.1.0+local"}.get(name, "not installed"))
    assert command._optional_packages()["DeepEP"].startswith("deep_ep 2.1.0+local; carries rows")


def test_batch_invariance_shows_in_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(registry, "_chip", lambda device_type: "sm_90")
    monkeypatch.setattr(command, "describe_devices", lambda: ["Some GPU"])
    entries = facts_of("nvidia", "determinism.batch_invariant=true")["kernels"]
    assert all(entry["batch_invariant"] and entry["verified_here"] for entry in entries.values())


def test_a_choice_that_cannot_be_made_is_a_fact() -> None:
    assert "'abacus' is no backend" in facts_of("cpu", "kernels.overrides={linear: abacus}")["kernels"]["not usable"]


def test_compilers_and_driver_are_named_or_said_to_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    found = devices.describe_toolchain()
    assert (found["NVIDIA driver"], found["nvcc"], found["C compiler"]) == ("none", "none", "none")


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--json", "--set", "accelerator=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]["rms_norm"]["backend"] == "reference"
