"""Cases of a product in parts and of the choice of experts from them; on a CPU under Triton's interpreter."""

from __future__ import annotations

import torch
from support.op_cases import Bench, close, same

from deepinfer.kernels.nvidia.gemm import matmul, matmul_parts
from deepinfer.kernels.nvidia.routing import choose_experts


def check_router(bench: Bench) -> None:
    """A row has the same bits alone or not; tiles stick out; other depths go as well; so does no row at all."""
    for num_rows, columns, depth in ((70, 96, 1280), (3, 384, 640), (3, 24, 96)):
        x, weight = bench.normal(num_rows, depth), bench.normal(columns, depth, scale=depth**-0.5)
        for few_rows in (False, True):
            parts = matmul_parts(x, weight, few_rows=few_rows)
            assert (len(parts) == 5) == (few_rows and depth % 320 == 0)
            total = _added(parts)
            close(total, x.double() @ weight.double().t(), 1e-5)
            same(matmul_parts(x[2:3], weight, few_rows=few_rows), parts[:, 2:3])
            _check_choice(bench, parts, total)
        same(_added(matmul_parts(x, weight)), matmul(x.unsqueeze(1), weight.unsqueeze(0), torch.float32))
        assert matmul_parts(x[:0], weight).shape[1:] == (0, columns)


def _added(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _check_choice(bench: Bench, parts: torch.Tensor, logits: torch.Tensor) -> None:
    bias, nobody = (
        bench.normal(logits.shape[1]).float(),
        torch.zeros(len(logits), dtype=torch.bool, device=bench.device),
    )
    found = choose_experts(parts, bias, nobody, num_chosen=6, scale=1.5)
    for one, other in zip(
        found, choose_experts(logits.unsqueeze(0), bias, nobody, num_chosen=6, scale=1.5), strict=True
    ):
        same(one, other)
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    wanted = (scores + bias).topk(6).indices.sort().values
    same(found[0], wanted)
    chosen = scores.gather(1, wanted)
    close(found[1], chosen / chosen.sum(1, keepdim=True) * 1.5, 1e-5)
