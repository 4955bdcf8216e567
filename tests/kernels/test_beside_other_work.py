"""What a kernel computes does not depend on what else the device does: its own steps keep their order by themselves."""

from __future__ import annotations

import pytest
import torch
from support.op_cases import Bench, released
from support.row_cases import CASES, NUM_ROWS
from torch import Tensor

from deepinfer.kernels.ops import REFERENCE_NUMERICS
from deepinfer.kernels.registry import op_names, select_kernels

REPEATS = 40


def keep_busy(stream: torch.cuda.Stream) -> None:
    """Launch products and copies that last about as long as the repeats of an op."""
    with torch.cuda.stream(stream):
        matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
        data = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        for _ in range(10):
            torch.mm(matrix, matrix)
            data[: 1 << 27].copy_(data[1 << 27 :])


def copies(parts: list[Tensor]) -> list[Tensor]:
    return [part.contiguous().view(torch.uint8).clone() for part in parts]


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", [{}, dict.fromkeys(op_names(), "triton")], ids=["default", "triton"])
@pytest.mark.parametrize("op", op_names())
def test_bits_are_the_same_beside_other_work(op: str, overrides: dict[str, str]) -> None:
    kernels = select_kernels("nvidia", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides=overrides)
    run, rows = CASES[op](Bench(kernels, released(NUM_ROWS), torch.device("cuda"), seed=8)), torch.arange(NUM_ROWS)
    rows = rows.to("cuda")
    wanted = copies(run(rows))
    torch.cuda.synchronize()
    keep_busy(torch.cuda.Stream())
    found = [copies(run(rows)) for _ in range(REPEATS)]
    for again in found:
        for number, (part, whole) in enumerate(zip(again, wanted, strict=True)):
            assert torch.equal(part, whole), f"output {number} of {op} is not the same each time"
