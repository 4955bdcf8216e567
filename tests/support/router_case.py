"""Cases of the router's product in parts and of the choice from them; on a CPU under Triton's interpreter."""

from __future__ import annotations

import torch
from support.op_cases import Bench, close, same

from deepinfer.kernels.nvidia.router_product import router_parts
from deepinfer.kernels.nvidia.routing import choose_experts


def check_router(bench: Bench) -> None:
    """A row's logits have the same bits in parts or added, alone or not; tiles stick out; other depths go as well."""
    for num_rows, columns, depth in ((70, 96, 1280), (3, 384, 640), (3, 24, 96)):
        x, weight = bench.normal(num_rows, depth), bench.normal(columns, depth, scale=depth**-0.5)
        parts, added = router_parts(x, weight), router_parts(x, weight, max_split_rows=0)
        assert (len(parts) > 1, len(added)) == (depth % 640 == 0, 1)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        same(added[0], total)
        close(total, x.double() @ weight.double().t(), 1e-5)
        same(router_parts(x[2:3], weight), parts[:, 2:3])
        _check_choice(bench, parts, total)
    assert router_parts(x[:0], weight).shape[1:] == (0, 24)


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
