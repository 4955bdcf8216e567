"""Cases of grouped FP8 products and of what leads to them; on a CPU under Triton's interpreter."""

from __future__ import annotations

import torch
from support.op_cases import Bench, close, same
from torch import Tensor

from deepinfer.kernels.nvidia.cast_rows import PlacedRows, place_rows
from deepinfer.kernels.nvidia.casts import GROUP
from deepinfer.kernels.nvidia.expert_layout import ExpertLayout, lay_out_experts
from deepinfer.kernels.nvidia.fp8_weights import Fp8Weight, dequantise, recast_fp4
from deepinfer.kernels.nvidia.grouped_fp8 import foresee_tiles, multiply_tiles, swiglu_places
from deepinfer.kernels.reference.quantize import decode_e8m0

_HIDDEN, _WIDTH, _NUM_EXPERTS, _NUM_ROWS = 256, 128, 3, 150


def check_fp8_tiles(bench: Bench) -> None:
    """Rows of experts in tiles, whoever gets them and wherever a part ends: the second part is like the first."""
    ids = bench.integers(-1, _NUM_EXPERTS, _NUM_ROWS, 2)
    for copies, part in ((ids, 2 * GROUP), (ids, 5 * GROUP), (torch.full_like(ids, 2), GROUP), (ids[:1], 2 * GROUP)):
        layout = lay_out_experts(copies, num_experts=_NUM_EXPERTS, tile=GROUP)
        _check_placed(bench, layout, len(copies), part)
        _check_swiglu(bench, layout, copies.numel(), part)
        _check_product(bench, layout, part)
    nobody = lay_out_experts(torch.full_like(ids, -1), num_experts=_NUM_EXPERTS, tile=GROUP)
    _check_product(bench, nobody, 2 * GROUP)
    _check_foreseen()


def _whole_scales(placed: PlacedRows) -> Tensor:
    """[P, K / 128]."""
    return placed.scales.transpose(0, 1).flatten(1).t()[: len(placed.codes)]


def _check_placed(bench: Bench, layout: ExpertLayout, num_rows: int, part: int) -> None:
    packed, known = bench.integers(0, 255, num_rows, 384).to(torch.uint8), layout.source >= 0
    placed = place_rows(packed, layout, width=_HIDDEN, part=part)
    rows = packed[layout.source[known].long()]
    same(placed.codes.view(torch.uint8)[known], rows[:, :_HIDDEN])
    same(_whole_scales(placed)[known], decode_e8m0(rows[:, _HIDDEN : _HIDDEN + _HIDDEN // GROUP]))


def _check_swiglu(bench: Bench, layout: ExpertLayout, num_copies: int, part: int) -> None:
    both, known = bench.normal(layout.num_places, 2 * _WIDTH, scale=3), layout.copy >= 0
    weights = bench.normal(num_copies, dtype=torch.float32)
    placed = swiglu_places(both, weights, layout, limit=2.5, part=part)
    gate, up = both[known].float().chunk(2, 1)
    values = torch.nn.functional.silu(gate.clamp_max(2.5)) * up.clamp(-2.5, 2.5)
    values = weights[layout.copy[known].long(), None] * values
    found = placed.codes[known].float() * _whole_scales(placed)[known]
    bound = values.abs().amax(1, keepdim=True) * 2.0**-9 + values.abs() * 2.0**-4
    assert bool(((found - values).abs() <= 1.1 * bound).all())


def _check_product(bench: Bench, layout: ExpertLayout, part: int) -> None:
    """Tiles of the second part, of the first one if that is all; others and those of nobody stay as they were."""
    weight, known, num_places = _weights(bench), layout.expert >= 0, layout.num_places
    codes = bench.normal(num_places, _HIDDEN, scale=30).to(torch.float8_e4m3fn)
    scales = torch.exp2(bench.integers(-9, 0, -(-num_places // part), _HIDDEN // GROUP, part).float())
    x = PlacedRows(codes, scales)
    first = part // GROUP if part < num_places else 0
    out = torch.full((num_places, weight.codes.shape[1]), 7.0, dtype=torch.bfloat16, device=bench.device)
    multiply_tiles(x, weight, layout.expert, out, first=first, num_programs=3)
    written = (layout.expert.view(-1, GROUP)[:, 0] >= 0).repeat_interleave(GROUP)
    written[: first * GROUP] = False
    same(out[~written], torch.full_like(out[~written], 7.0))
    known &= written
    rows = (codes.float().unflatten(1, (-1, GROUP)) * _whole_scales(x).unsqueeze(2)).flatten(1)[known].double()
    wanted = torch.stack([dequantise(Fp8Weight(*part)) for part in zip(weight.codes, weight.scale, strict=True)])
    close(out[known], torch.einsum("pk,pnk->pn", rows, wanted.double()[layout.expert[known].long()]), 3e-3)


def _weights(bench: Bench) -> Fp8Weight:
    packed = bench.integers(0, 256, _NUM_EXPERTS, 2 * _WIDTH, _HIDDEN // 2).to(torch.uint8)
    weight = recast_fp4(packed, bench.integers(118, 122, _NUM_EXPERTS, 2 * _WIDTH, _HIDDEN // 32).to(torch.uint8))
    assert weight is not None
    return weight


def _check_foreseen() -> None:
    def foreseen(num_copies: int, num_experts: int, num_tiles: int = 10_000) -> int:
        return foresee_tiles(num_copies, num_experts=num_experts, num_tiles=num_tiles)

    assert foreseen(4096 * 6, 96) == 247, "half full, and some more"
    assert foreseen(300 * 96, 96) == 3 * 96, "all experts spill over"
    assert foreseen(4 * 96, 96) == 96, "all experts get some"
    assert foreseen(0, 96) == 55
    assert foreseen(4096 * 6, 96, 255) == 247
    assert foreseen(4096 * 6, 96, 254) == 254, "not worth a look"
    assert foreseen(4096 * 6, 96, 5) == 5
