"""The router's product in Triton: few columns, a long sum, so K is cut to keep all processors busy.

A row's sum has one order whatever the number of rows: along each part of K, then part after part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.gemm import matmul

_ROWS, _COLUMNS, _DEPTH = 64, 64, 64
_PARTS = 5
_WARPS, _STAGES = 4, 5
_MAX_SPLIT_ROWS = 2048  # of more rows, a program goes through all parts: there are enough programs


@triton.jit(do_not_specialize=["num_rows"])
def _router_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of x times weight transposed: with SPLIT part program_id(2) of the sum, otherwise all of them, added."""
    PART_DEPTH: tl.constexpr = K // PARTS
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    known, wanted = (rows < num_rows)[:, None], (columns < N)[None, :]
    x_ptr += rows[:, None] * K + depth[None, :]
    weight_ptr += columns[None, :] * K + depth[:, None]
    if SPLIT:
        first, count = tl.program_id(2), 1
        out_ptr += first.to(tl.int64) * num_rows * N
    else:
        first, count = 0, PARTS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in range(first, first + count):
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(part * PART_DEPTH, (part + 1) * PART_DEPTH, DEPTH):
            x = tl.load(x_ptr + start, mask=known, other=0.0)
            weight = tl.load(weight_ptr + start, mask=wanted, other=0.0)
            product = tl.dot(x, weight, product)
        total += product
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], total, mask=known & wanted)


def router_parts(x: Tensor, weight: Tensor, *, max_split_rows: int = _MAX_SPLIT_ROWS) -> Tensor:
    """x [T, K] times weight [N, K] transposed, in float32 parts [P, T, N] that are to be added in their order.

    Of more than `max_split_rows` rows the parts come added: P = 1. The bits of the sum are the same.
    """
    (num_rows, k), n = x.shape, len(weight)
    if x.dtype == torch.float32 or k % (_PARTS * _DEPTH):
        return matmul(x.unsqueeze(1), weight.to(x.dtype).unsqueeze(0), torch.float32).unsqueeze(0)
    num_parts = _PARTS if num_rows <= max_split_rows else 1
    out = torch.empty(num_parts, num_rows, n, dtype=torch.float32, device=x.device)
    if num_rows:
        _router_kernel[(triton.cdiv(n, _COLUMNS), triton.cdiv(num_rows, _ROWS), num_parts)](
            x.contiguous(),
            weight,
            out,
            num_rows,
            N=n,
            K=k,
            PARTS=_PARTS,
            SPLIT=num_parts > 1,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return out
