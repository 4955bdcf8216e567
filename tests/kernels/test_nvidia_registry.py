"""Which kernels a GPU would get: preference, missing packages, chips, numerics and batch-invariance. No GPU needed."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest

from deepinfer.errors import ConfigError
from deepinfer.kernels import registry
from deepinfer.kernels.registry import KernelSet, load_backend, op_names, select_kernels

pytest.importorskip("triton")


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_chip", lambda device_type: "sm_90" if device_type == "cuda" else None)


def choose(*, numerics: str = "reference", batch_invariant: bool = False, **overrides: str) -> KernelSet:
    return select_kernels("nvidia", numerics=numerics, batch_invariant=batch_invariant, overrides=overrides)


@pytest.mark.usefixtures("chip")
def test_missing_packages_are_passed_over_with_their_price(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backends = {**registry._BACKENDS, "deep_gemm": ("no_such_package",), "flash_mla": ("no_such_package",)}
    monkeypatch.setattr(registry, "_BACKENDS", backends)
    with caplog.at_level(logging.WARNING, "deepinfer"):
        kernels = choose()
    assert kernels.backends["quantized_linear"] == "cublas"
    assert kernels.backends["expert_mlp"] == kernels.backends["sparse_attention"] == "triton"
    assert "reference" not in kernels.backends.values()
    text = "\n".join(caplog.messages)
    assert "kernels deep_gemm can't be used (ModuleNotFoundError: No module named 'no_such_package')" in text
    assert "3 times slower" in text
    assert "kernels flash_mla can't be used" in text
    with pytest.raises(ConfigError, match=r"'expert_mlp'.*no_such_package"):
        choose(expert_mlp="deep_gemm")


@pytest.mark.usefixtures("chip")
def test_batch_invariance_leaves_cublas_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKENDS", {**registry._BACKENDS, "deep_gemm_bf16": ("no_such_package",)})
    assert choose().backends["linear"] == "cublas"
    assert choose(batch_invariant=True).backends["linear"] == "triton"
    with pytest.raises(ConfigError, match=r"batch-invariant .* backends cublas"):
        choose(batch_invariant=True, linear="cublas")


@pytest.mark.usefixtures("chip")
def test_batch_invariant_products_go_to_the_fastest_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "deepinfer.kernels.nvidia.deep_gemm_bf16"
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    try:
        assert choose(batch_invariant=True).backends["linear"] == "deep_gemm_bf16"
        assert choose().backends["linear"] == "cublas"
    finally:
        sys.modules.pop(path, None)


@pytest.mark.usefixtures("chip")
def test_float32_goes_to_kernels_that_keep_it() -> None:
    backends = choose(numerics="fp32").backends
    assert backends["rms_norm"] == backends["linear"] == "triton"
    assert backends["index_select"] == backends["sparse_attention"] == backends["expert_mlp"] == "reference"


def test_a_new_chip_is_named_with_what_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "_chip", lambda device_type: "sm_100")
    with caplog.at_level(logging.WARNING, "deepinfer"):
        choose()
    assert any(message.startswith("not tested on sm_100:") and "rms_norm" in message for message in caplog.messages)


def test_triton_has_every_op_and_says_where_it_was_tested() -> None:
    backend = load_backend("triton", "cpu")
    assert backend.fault is None
    assert set(backend.implementations) == set(op_names())
    for entry in backend.implementations.values():
        assert entry.package == "triton"
        assert entry.batch_invariant
        assert entry.verified_chips == ("sm_90",)
