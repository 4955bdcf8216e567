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
    if num_tiles == 1:
        return torch.mm(padded, transposed)[:num_rows]
    out = x.new_empty(num_tiles * ROW_TILE, weight.shape[0])
    for source, target in zip(padded.split(ROW_TILE), out.split(ROW_TILE), strict=True):
        torch.mm(source, transposed, out=target)
    return out[:num_rows]


def matmul_tiles(x: Tensor, weights: Tensor, tile_weights: list[int]) -> Tensor:
    """Tile i of x [tiles * ROW_TILE, K] times `weights[tile_weights[i]]` [N, K] transposed, float32."""
    out = x.new_empty(x.shape[0], weights.shape[1])
    transposed = weights.transpose(1, 2)
    tiles = zip(x.split(ROW_TILE), out.split(ROW_TILE), tile_weights, strict=True)
    for source, target, number in tiles if tile_weights else ():
        torch.mm(source, transposed[number], out=target)
    return out


def pad_rows(x: Tensor, num_rows: int, value: float = 0) -> Tensor:
    """Return x with rows of `value` appended up to `num_rows`, contiguous."""
    if x.shape[0] == num_rows:
        return x.contiguous()
    padded = x.new_full((num_rows, *x.shape[1:]), value)
    padded[: x.shape[0]] = x
    return padded
