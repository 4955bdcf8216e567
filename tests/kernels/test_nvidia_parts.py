"""Kernels of an NVIDIA GPU that are no ops by themselves."""

from __future__ import annotations

import pytest
import torch
from support.op_cases import Bench, small

from deepinfer.kernels.ops import REFERENCE_NUMERICS
from deepinfer.kernels.registry import select_kernels

pytest.importorskip("triton")
from support.nvidia_cases import CHECKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", CHECKS)
def test_parts(check: str) -> None:
    kernels = select_kernels("nvidia", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides={})
    CHECKS[check](Bench(kernels, small(), torch.device("cuda"), seed=1))
