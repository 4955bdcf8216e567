"""Choice of kernels: every op served, abilities respected, errors that name the op."""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.kernels import registry
from deepinfer.kernels.registry import Backend, Implementation, op_names, select_kernels


def test_every_op_has_an_implementation_on_the_cpu() -> None:
    kernels = select_kernels("cpu", numerics="reference", batch_invariant=True, overrides={})
    assert kernels.describe() == dict.fromkeys(op_names(), "reference")
    assert kernels.numerics.dtype == torch.bfloat16


def test_float32_numerics_round_nothing() -> None:
    numerics = select_kernels("cpu", numerics="fp32", batch_invariant=False, overrides={}).numerics
    assert (numerics.dtype, numerics.quantise_activations, numerics.quantise_caches) == (torch.float32, False, False)


def test_a_missing_ability_is_an_error_that_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(op: str) -> Implementation:
        return Implementation(op, lambda _: op, ("cpu",), (torch.bfloat16,), batch_invariant=op != "linear")

    def load(name: str, device_type: str) -> Backend:
        return Backend(name, {op: entry(op) for op in op_names()}, None)

    monkeypatch.setattr(registry, "load_backend", load)
    assert select_kernels("cpu", numerics="reference", batch_invariant=False, overrides={}).rms_norm == "rms_norm"
    with pytest.raises(ConfigError, match="op 'linear' for batch-invariant"):
        select_kernels("cpu", numerics="reference", batch_invariant=True, overrides={})
    with pytest.raises(ConfigError, match="float32 on cpu"):
        select_kernels("cpu", numerics="fp32", batch_invariant=False, overrides={})


@pytest.mark.parametrize(
    ("platform", "overrides", "path"),
    [
        ("abacus", {}, "accelerator"),
        ("cpu", {"liner": "reference"}, "kernels.overrides.liner"),
        ("cpu", {"linear": "abacus"}, "kernels.overrides.linear"),
    ],
)
def test_unknown_names_are_refused(platform: str, overrides: dict[str, str], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select_kernels(platform, numerics="reference", batch_invariant=False, overrides=overrides)
    assert caught.value.path == path
