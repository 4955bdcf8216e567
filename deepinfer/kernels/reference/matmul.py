"""The one matrix product of the reference kernels: the bits of a row never depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_TILE = 16


def matmul_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed, float32 -> [T, N].

    Rows go through in padded tiles of `ROW_TILE`, so every product has the same shape: libraries choose another order
    of summation for few rows than for many.
    """
    num_rows, transposed = x.shape[0], weight.t()
    num_tiles = -(-num_rows // ROW_TILE)
    padded = pad_rows(x, num_tiles * ROW_TILE)
    out = x.new_empty(num_tiles * ROW_TILE, weight.shape[0])
    for start in range(0, num_tiles * ROW_TILE, ROW_TILE):
        torch.mm(padded[start : start + ROW_TILE], transposed, out=out[start : start + ROW_TILE])
    return out[:num_rows]


def pad_rows(x: Tensor, num_rows: int, value: float = 0) -> Tensor:
    """Return x with rows of `value` appended up to `num_rows`, contiguous."""
    if x.shape[0] == num_rows:
        return x.contiguous()
    padded = x.new_full((num_rows, *x.shape[1:]), value)
    padded[: x.shape[0]] = x
    return padded
