"""Products of compiled kernels wait for the copies into shared memory that they read, by the rules of the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.op_cases import Bench, released
from support.row_cases import CASES, NUM_ROWS

from deepinfer.kernels.ops import REFERENCE_NUMERICS
from deepinfer.kernels.registry import op_names, select_kernels

WAIT, PRODUCT, FENCE = "cp.async.wait_group", "wgmma.mma_async", "fence.proxy.async"


def fenced(code: str) -> list[bool]:
    """Of each place of `code` (PTX) where copies are waited for and products come next: whether a fence is between."""
    pieces = code.split(WAIT)[1:]
    return [FENCE in piece[: piece.index(PRODUCT)] for piece in pieces if PRODUCT in piece]


def test_how_fences_are_found() -> None:
    assert fenced(f"a {WAIT} b {FENCE} c {PRODUCT} d {PRODUCT} {WAIT} {FENCE}") == [True]
    assert fenced(f"{FENCE} {WAIT} b {PRODUCT} {FENCE} {WAIT} {FENCE} {PRODUCT}") == [False, True]
    assert fenced(f"{FENCE} {PRODUCT}") == []


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["linear", "route_tokens", "mix_coefficients", "index_select", "expert_mlp"])
def test_products_come_behind_a_fence(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    launch, compiled = jit.JITFunction.run, []

    def keep(self: Any, *args: Any, **options: Any) -> Any:
        compiled.append((self.__name__, launch(self, *args, **options)))
        return compiled[-1][1]

    monkeypatch.setattr(jit.JITFunction, "run", keep)
    kernels = select_kernels(
        "nvidia", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides=dict.fromkeys(op_names(), "triton")
    )
    CASES[op](Bench(kernels, released(NUM_ROWS), torch.device("cuda"), seed=8))(torch.arange(NUM_ROWS, device="cuda"))
    found = {name: fenced(kernel.asm["ptx"]) for name, kernel in compiled}
    assert any(found.values()), f"no kernel of {op} copies ahead for its products: {sorted(found)}"
    assert all(all(places) for places in found.values()), found
