"""Random cases of kernels of an NVIDIA GPU that are no ops by themselves; like `op_cases`, for GPU and interpreter."""

from __future__ import annotations

import torch
from support.flat_pool_case import check_flat_pool
from support.op_cases import Bench, Check, same

from deepinfer.kernels.nvidia.fp8_weights import dequantise, recast_fp4
from deepinfer.kernels.nvidia.select import block_maxima, select_largest
from deepinfer.kernels.reference.index_select import choose_entries
from deepinfer.kernels.reference.quantize import dequantize_fp4


def check_recast(bench: Bench) -> None:
    """FP8 weights of experts hold the FP4 values exactly; scales too far apart are noticed, except of zeros."""
    packed = bench.integers(0, 256, 2, 128, 128).to(torch.uint8)
    scale = bench.integers(110, 123, 2, 128, 8).to(torch.uint8)
    recast = recast_fp4(packed, scale)
    assert recast is not None
    for expert in range(2):
        wanted = dequantize_fp4(packed[expert], scale[expert])
        parts = type(recast)(recast.codes[expert], recast.scale[expert])
        same(dequantise(parts), wanted)
    scale[1, 5, 2] = 90
    assert recast_fp4(packed, scale) is None
    packed[1, 5, 32:48] = 0x80
    assert recast_fp4(packed, scale) is not None


def check_select(bench: Bench) -> None:
    """Choices from wide rows: many ties, few usable values, rows that rise and fall, and of which little is visible."""
    num_selected, width = 8, 20011
    values = bench.normal(6, width)
    values[1] = values[1].round()
    values[2] = -torch.inf
    values[2, 7::4001] = 1.0
    values[3] = torch.arange(width, device=bench.device).to(torch.bfloat16)
    values[4] = -values[3]
    visible = torch.tensor([width, width, width, width - 3, width, 5], device=bench.device)
    hidden = torch.arange(width, device=bench.device) >= visible.unsqueeze(1)
    wanted = choose_entries(values.float().masked_fill(hidden, -torch.inf), num_selected)
    same(select_largest(values, num_selected, visible=visible), wanted)
    maxima = block_maxima(values, visible, unit=1, size=8, newest=False)
    same(select_largest(values, num_selected, visible=visible, maxima=maxima), wanted)
    same(select_largest(values[:, :900], num_selected), choose_entries(values[:, :900].float(), num_selected))


CHECKS: dict[str, Check] = {"recast": check_recast, "select": check_select, "flat_pool": check_flat_pool}
