"""Errors name the place and the cure; sources have the promised order of strength."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepinfer.config import (
    ENVIRONMENT,
    ClusterConfig,
    SpeculativeConfig,
    all_paths,
    config_fields,
    decode_config,
    encode_config,
    keep_compiled_kernels,
    load_config,
    resolve,
)
from deepinfer.errors import ConfigError


def _write(directory: Path, text: str) -> Path:
    file = directory / "cluster.yaml"
    file.write_text(text)
    return file


def _message(**arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"environ": {}, **arguments})  # type: ignore[arg-type]
    return str(caught.value)


def test_order_of_strength(tmp_path: Path) -> None:
    file = _write(tmp_path, "model: from-file\ndecode: {ranks: 3, max_running: 7}\n")
    environ = {"DEEPINFER_HF_MODEL_DIR": "from-environment", "HOME": "/"}
    loaded = load_config(file, settings=["decode.ranks=5"], environ=environ)
    assert loaded.config.model.path == "from-environment"
    assert (loaded.config.decode.ranks, loaded.config.decode.max_running) == (5, 7)
    assert loaded.config.prefill == ClusterConfig().prefill
    assert loaded.sources == {
        "model.path": "DEEPINFER_HF_MODEL_DIR",
        "decode.ranks": "--set",
        "decode.max_running": "file",
    }
    assert load_config(file, model="from-option", environ=environ).config.model.path == "from-option"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decod: {}", "decod: unknown key; did you mean decode?"),
        ("decode: {rank: 4}", "decode.rank: unknown key; did you mean ranks?"),
        ("decode: {ranks: four}", "decode.ranks: must be a whole number, not 'four'"),
        ("decode: 4", "decode: must be a section with fields, not 4"),
        ("decode: {ranks: 0}", "decode.ranks: must be above 0 and finite, not 0"),
        ("scheduler: {publish_seconds: .nan}", "scheduler.publish_seconds: must be above 0 and finite, not nan"),
        ("scheduler: {step_timeout_seconds: .inf}", "scheduler.step_timeout_seconds: must be above 0 and finite"),
        ("ray: {provider: slurm}", "ray.provider: 'slurm' is not known; use local, ssh, kuberay, existing"),
        ("cache: {block_size: 3}", "cache.block_size: must be even, not 3"),
        ("cache: {memory_fraction: 1.5}", "cache.memory_fraction: must lie in (0, 1], not 1.5"),
        ("experts: {rebalance: true}", "experts.rebalance: True is not available yet; leave it out or set False"),
        ("accelerator: ascend", "accelerator: 'ascend' is not available yet; use 'nvidia' or 'cpu'"),
        ("- a list", "must hold a mapping of sections, not a list"),
        ("a: [", "is no valid YAML: line 1, column 5: expected the node content, but found '<stream end>'"),
        ("a: \x00", "is no valid YAML: unacceptable character #x0000"),
        ("cache: {memory_fraction: much}", "cache.memory_fraction: must be a number, not 'much'"),
        ("ray: {hosts: one}", "ray.hosts: must be a list, not 'one'"),
        ("decode: {graphs: true}", "decode.graphs: True is not known; use auto, off"),
    ],
)
def test_yaml_errors_name_path_and_cure(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in _message(file=_write(tmp_path, text))


def test_a_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_bytes("name: a".encode("utf-16"))
    assert f"{tmp_path / 'cluster.yaml'} is no UTF-8 text" in _message(file=tmp_path / "cluster.yaml")


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert f"can't read the config file {tmp_path / 'none.yaml'}" in _message(file=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DEEPINFER_CACHEDIR", "/tmp", "did you mean DEEPINFER_CACHE_DIR?"),
        ("DEEPINFER_BATCH_INVARIANT", "yes", "'yes' is neither 0 nor 1"),
        (
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
            "short",
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE: 'short' is not known; use off, compact",
        ),
        (
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
            "0",
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS: must be above 0 and finite, not 0",
        ),
        ("DEEPINFER_USE_NEXTN_DECODE", "6", "DEEPINFER_USE_NEXTN_DECODE: must lie in 0 .. 5, not 6"),
        ("DEEPINFER_USE_NEXTN_DECODE", "-1", "DEEPINFER_USE_NEXTN_DECODE: must lie in 0 .. 5, not -1"),
        ("DEEPINFER_USE_NEXTN_DECODE", "x", "'x' is no integer"),
        ("DEEPINFER_ACCELERATOR", "tpu", "DEEPINFER_ACCELERATOR: 'tpu' is not known; use auto, cpu, nvidia"),
    ],
)
def test_environment_errors(name: str, value: str, expected: str) -> None:
    assert expected in _message(environ={name: value})


def test_variables_of_drafts() -> None:
    assert load_config(environ={}).config.speculative == SpeculativeConfig(
        max_draft_tokens=5, varlen=False, verifier="shared_noise"
    )
    environ = {"DEEPINFER_USE_NEXTN_DECODE": "0", "DEEPINFER_ENABLE_MTP_VARLEN": "1"}
    chosen = load_config(environ=environ).config.speculative
    assert (chosen.max_draft_tokens, chosen.varlen) == (0, True)


def test_rejection_is_refused_with_batch_invariance() -> None:
    message = _message(environ={"DEEPINFER_BATCH_INVARIANT": "1"}, settings=["speculative.verifier=rejection"])
    assert message.startswith("speculative.verifier: 'rejection' makes the output depend on")
    assert "use 'shared_noise'" in message
    assert "verifier" in _message(settings=["speculative.verifier=coin"])


def test_variables_of_prompts_and_determinism() -> None:
    config = load_config(
        environ={
            "DEEPINFER_BATCH_INVARIANT": "1",
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "off",
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140",
        }
    ).config
    assert config.determinism.batch_invariant
    assert (config.model.prefill_truncation, config.model.prefill_keep_tokens) == ("off", 140)
    assert ClusterConfig().model.prefill_truncation == "compact"


def test_off_is_a_word_where_it_is_a_value(tmp_path: Path) -> None:
    """YAML reads a bare `off` as false."""
    assert load_config(settings=["model.prefill_truncation=off"], environ={}).config.model.prefill_truncation == "off"
    file = _write(tmp_path, "model: {prefill_truncation: off}\nray: {dashboard: off}\n")
    config = load_config(file, environ={}).config
    assert (config.model.prefill_truncation, config.ray.dashboard) == ("off", False)
    wrong = _message(settings=["model.prefill_truncation=on"])
    assert wrong == "model.prefill_truncation: True is not known; use off, compact"


def test_bad_settings() -> None:
    assert "must look like section.field=value" in _message(settings=["decode.ranks"])
    assert "decode.rank: unknown key" in _message(settings=["decode.rank=1"])


def test_every_variable_sets_an_existing_option() -> None:
    assert {variable.path for variable in ENVIRONMENT} <= set(all_paths())


def test_resolve_fills_what_depends_on_the_machine() -> None:
    cpu = resolve(ClusterConfig(), accelerator="cpu")
    assert (cpu.accelerator, cpu.prefill.ranks, cpu.decode.ranks) == ("cpu", 2, 4)
    gpu = resolve(ClusterConfig(), accelerator="nvidia")
    assert (gpu.accelerator, gpu.prefill.ranks, gpu.decode.ranks) == ("nvidia", 1, 1)
    assert (cpu.prefill.step_tokens, gpu.prefill.step_tokens) == (2048, 8192)
    chosen = load_config(settings=["prefill.max_tokens_per_step=300"], environ={}).config
    assert resolve(chosen, accelerator="nvidia").prefill.step_tokens == 300
    assert None not in (config_fields(cpu)["prefill.ranks"], config_fields(cpu)["decode.ranks"])
    assert resolve(cpu, accelerator="nvidia") == cpu
    assert resolve(gpu, accelerator="nvidia") == gpu


@pytest.mark.parametrize(
    ("accelerator", "settings", "shared"),
    [
        ("nvidia", [], 2),
        ("nvidia", ["decode.ranks=1"], 1),
        ("nvidia", ["decode.ranks=2", "ranks_per_device=3"], 3),
        ("cpu", [], 1),
    ],
)
def test_two_ranks_share_a_gpu_when_nobody_says_how_many_there_are(
    accelerator: str, settings: list[str], shared: int
) -> None:
    config = load_config(settings=settings, environ={}).config
    assert resolve(config, accelerator=accelerator).ranks_per_device == shared


def test_config_survives_the_wire() -> None:
    config = load_config(settings=["ray.runtime_env={env_vars: {A: b}}", "kernels.overrides={gate: reference}"]).config
    assert decode_config(encode_config(config)) == config


def test_compiled_kernels_are_kept_below_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """P50: no two ranks fill one folder of DeepGEMM. Who has chosen a place keeps it."""
    for name in ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards
        monkeypatch.delenv(name)
    keep_compiled_kernels("/cache", rank_name="decode-3")
    found = os.environ["TRITON_CACHE_DIR"], os.environ["DG_JIT_CACHE_DIR"]
    assert found == ("/cache/triton", "/cache/deep_gemm/decode-3")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    keep_compiled_kernels("/cache", rank_name="decode-4")
    assert (os.environ["TRITON_CACHE_DIR"], os.environ["DG_JIT_CACHE_DIR"]) == ("/mine", "/cache/deep_gemm/decode-3")


def test_memory_for_handovers_unless_they_cross_hosts() -> None:
    """As much as is set; else by platform, and none where there are more GPUs than a host has."""

    def resolved(accelerator: str, *settings: str) -> int | None:
        config = load_config(settings=settings, environ={}).config
        return resolve(config, accelerator=accelerator).cache.handover_bytes

    assert resolved("cpu") == 16 << 20
    assert resolved("nvidia") == resolved("nvidia", "prefill.ranks=4", "decode.ranks=4") == 1 << 30
    assert resolved("nvidia", "prefill.ranks=4", "decode.ranks=5") == 0
    assert resolved("nvidia", "prefill.ranks=4", "decode.ranks=5", "ranks_per_device=2") == 1 << 30
    assert resolved("nvidia", "decode.ranks=64", "prefill.ranks=4", "cache.handover_bytes=7") == 7
    assert resolved("nvidia", "cache.handover_bytes=0") == 0
    with pytest.raises(ConfigError, match=r"cache\.handover_bytes: must be 0 or more, not -1"):
        resolved("cpu", "cache.handover_bytes=-1")
