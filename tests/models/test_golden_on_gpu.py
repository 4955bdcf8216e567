"""Golden checkpoints on a GPU against the official reference, teacher-forced: see the golden set's README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden_case import load_model, variants
from support.golden_replay import replay_cases

from deepinfer.kernels.ops import FP32_NUMERICS, REFERENCE_NUMERICS, Numerics
from deepinfer.kernels.registry import KernelSet, op_names, select_kernels

pytestmark = pytest.mark.gpu
SETS = ("default", "batch_invariant", "triton")


def _kernels(name: str, numerics: Numerics) -> KernelSet:
    overrides = dict.fromkeys(op_names(), "triton") if name == "triton" else {}
    return select_kernels("nvidia", numerics=numerics, batch_invariant=name == "batch_invariant", overrides=overrides)


@pytest.mark.parametrize("name", SETS[:2])  # Triton has no float32 kernel of its own for everything
def test_float32(golden_dir: Path, name: str) -> None:
    for variant in variants(golden_dir):
        model = load_model(variant, _kernels(name, FP32_NUMERICS), device="cuda")
        for outcome in replay_cases(variant, model, "fp32_noq"):
            worst = outcome.error[: outcome.num_rows_before_a_tie("fp32_noq")].max()
            assert worst < 1e-4, f"{variant.name} {outcome.name} {worst:.2e}"


@pytest.mark.parametrize("name", SETS)
def test_released_rounding(golden_dir: Path, name: str) -> None:
    for variant in variants(golden_dir):
        cases = json.loads((variant / "cases.json").read_text())
        measured: dict[str, Any] = cases["tolerances_measured"]["ref_alt_vs_ref"]["all_rows"]
        model = load_model(variant, _kernels(name, REFERENCE_NUMERICS), device="cuda")
        error = torch.cat([outcome.error for outcome in replay_cases(variant, model, "ref")])
        median, worst = float(error.median()), float(error.max())
        assert worst <= 1.25 * measured["rel_l2_max"], f"{variant.name} {worst:.3f}"
        assert median <= 1.05 * measured["rel_l2_p50"], f"{variant.name} {median:.3f}"
