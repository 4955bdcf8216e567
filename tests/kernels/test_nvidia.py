"""The kernels of an NVIDIA GPU against the reference, backend by backend, at small and at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import op_cases, step_cases
from support.op_cases import Bench, check_batch_invariance, released, small

from deepinfer.kernels.ops import REFERENCE_NUMERICS
from deepinfer.kernels.registry import KernelSet, backend_names, load_backend, op_names, select_kernels

pytestmark = pytest.mark.gpu
CHECKS = op_cases.CHECKS | step_cases.CHECKS
SETS = ("default", "batch_invariant", "triton")


def kernel_set(name: str) -> KernelSet:
    overrides = dict.fromkeys(op_names(), "triton") if name == "triton" else {}
    return select_kernels(
        "nvidia", numerics=REFERENCE_NUMERICS, batch_invariant=name == "batch_invariant", overrides=overrides
    )


@pytest.fixture(autouse=True)
def float32_sums() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("check", CHECKS)
def test_small_shapes(name: str, check: str) -> None:
    CHECKS[check](Bench(kernel_set(name), small(), torch.device("cuda"), seed=1))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("check", CHECKS)
def test_released_shapes(name: str, check: str) -> None:
    CHECKS[check](Bench(kernel_set(name), released(64), torch.device("cuda"), seed=2))


@pytest.mark.parametrize("backend", backend_names("nvidia"))
def test_every_backend_can_be_used(backend: str) -> None:
    assert load_backend(backend, "cuda").fault is None


@pytest.mark.parametrize("name", ["batch_invariant", "triton"])
def test_rows_do_not_depend_on_their_batch(name: str) -> None:
    check_batch_invariance(Bench(kernel_set(name), released(300), torch.device("cuda"), seed=3))
