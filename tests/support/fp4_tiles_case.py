"""Cases of the order in which FP4 weights are kept; on a CPU under Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from support.op_cases import Bench, same
from torch import Tensor

from deepinfer.kernels.nvidia.fp4_tiles import BLOCK, TILE_ROWS, Fp4Tiles, pack_fp4, widen_words
from deepinfer.kernels.reference.quantize import dequantize_fp4


@triton.jit
def _unpack_kernel(words_ptr, factor_ptr, out_ptr, ROWS: tl.constexpr, PLAIN: tl.constexpr):  # noqa: N803
    """One block [ROWS, 128]."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, 32)
    block = tl.program_id(0)
    words = tl.load(words_ptr + (block * ROWS + rows)[:, None] * 32 + columns[None, :])
    values = widen_words(words, tl.load(factor_ptr + block * ROWS + rows), PLAIN)
    for group in tl.static_range(4):
        tl.store(out_ptr + (block * ROWS + rows)[:, None] * 128 + 32 * group + columns[None, :], values[group])


def _unpack(tiles: Fp4Tiles) -> Tensor:
    """bf16 [E, tiles, 128, blocks * 128]."""
    num_experts, num_tiles, num_blocks, _ = tiles.factors.shape
    out = torch.empty(*tiles.factors.shape, BLOCK, dtype=torch.bfloat16, device=tiles.words.device)
    _unpack_kernel[(num_experts * num_tiles * num_blocks,)](
        tiles.words, tiles.factors, out, ROWS=TILE_ROWS, PLAIN=not out.is_cuda
    )
    return out.transpose(2, 3).flatten(3)


def check_fp4_tiles(bench: Bench) -> None:
    """All codes and far scales come back with their bits, those above 2 as well; the rest of a tile is zero."""
    first, second = (bench.integers(0, 256, 2, 70, 80).to(torch.uint8) for _ in "12")
    for low, high in ((0, 128), (110, 123), (124, 254)):
        scale, other = (bench.integers(low, high + 1, 2, 70, 5).to(torch.uint8) for _ in "12")
        tiles = pack_fp4((first, scale), (second, other))
        values = tiles.lift * _unpack(tiles).float()
        assert values.shape == (2, 2, 128, 256)
        assert not bool(values[..., 160:].any())
        for half, codes, scales in ((values[:, :, :64], first, scale), (values[:, :, 64:], second, other)):
            rows = half.flatten(1, 2)
            assert not bool(rows[:, 70:].any())
            for expert in range(2):
                same(rows[expert, :70, :160], dequantize_fp4(codes[expert], scales[expert]))
        assert (tiles.lift > 1) == (high > 128)
    alone = pack_fp4((first, torch.full_like(scale, 120)))
    same(_unpack(alone)[0, 0, :70, :160].float(), dequantize_fp4(first[0], torch.full_like(scale[0], 120)))
