"""Routed experts in Triton from FP4 weights: the portable choice, with 1 x 32 activation scales.

A product reads the weights once for a tile of rows, widens them in registers and multiplies from there, weights on the
left: rows then fill the narrow side of a tensor core's tile, which may be as small as 16. With few rows an expert this
runs at the speed of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, triton_kernel
from deepinfer.kernels.nvidia.casts import fp8_values, round_fp8
from deepinfer.kernels.nvidia.expert_layout import ExpertLayout, lay_out_experts
from deepinfer.kernels.nvidia.fences import fence_copies
from deepinfer.kernels.nvidia.fp4_tiles import BLOCK, TILE_ROWS, Fp4Tiles, pack_fp4, widen_words
from deepinfer.kernels.nvidia.moe import swiglu
from deepinfer.kernels.ops import Activations, ExpertRows, Numerics

_MIN_TILE, _MAX_TILE = 16, 128  # rows of an expert that share one pass over its weights
_STAGES = tl.constexpr(4)
_WARPS = 4
_TILE_ROWS = tl.constexpr(TILE_ROWS)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _load_columns(x_ptr, rows, inside, first, K: tl.constexpr, WHOLE: tl.constexpr):
    """32 columns of x [., K] from `first` on: [32, ROWS]. WHOLE: all blocks have 128 columns."""
    columns = first + tl.arange(0, 32)
    wanted = inside[None, :]
    if not WHOLE:
        wanted = wanted & (columns < K)[:, None]
    return tl.load(x_ptr + rows[None, :] * K + columns[:, None], mask=wanted, other=0.0)


@triton.jit
def _ended(total, PLAIN: tl.constexpr):
    """`total` of products that have ended.

    They read weights from registers, into which the next block is widened: Triton 3.6 lets the last of a block run on.
    """
    if not PLAIN:
        total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total


@triton.jit
def _multiply(
    x_ptr,
    rows,
    inside,
    words_ptr,
    factor_ptr,
    tile,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """A tile of weights times `rows` [ROWS] int64 of x [., K] -> float32 [128, ROWS]."""
    NUM_BLOCKS: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    inner = tl.arange(0, _TILE_ROWS)
    words_ptr += (tile * NUM_BLOCKS * _TILE_ROWS + inner)[:, None] * 32 + tl.arange(0, 32)[None, :]
    factor_ptr += tile * NUM_BLOCKS * _TILE_ROWS + inner
    total = tl.zeros((_TILE_ROWS, ROWS), tl.float32)
    for block in tl.range(0, NUM_BLOCKS, num_stages=_STAGES):
        words = tl.load(words_ptr + block * (_TILE_ROWS * 32))
        factors = tl.load(factor_ptr + block * _TILE_ROWS)
        first, second, third, fourth = widen_words(words, factors, PLAIN)
        start = block * _BLOCK
        fence_copies(PLAIN)
        total = tl.dot(first, _load_columns(x_ptr, rows, inside, start, K, WHOLE), total)
        total = tl.dot(second, _load_columns(x_ptr, rows, inside, start + 32, K, WHOLE), total)
        total = tl.dot(third, _load_columns(x_ptr, rows, inside, start + 64, K, WHOLE), total)
        total = tl.dot(fourth, _load_columns(x_ptr, rows, inside, start + 96, K, WHOLE), total)
        total = _ended(total, PLAIN)
    return total


@triton.jit
def _grouped_gate_up_kernel(
    x_ptr,
    words_ptr,
    factor_ptr,
    out_ptr,
    expert_ptr,
    source_ptr,
    copy_ptr,
    weights_ptr,
    num_places,
    limit,
    lift,
    N: tl.constexpr,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTISE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """64 columns of what enters `down`, for a tile of one expert's rows: gate and up, SwiGLU, routing weight, cast."""
    HALF: tl.constexpr = _TILE_ROWS // 2
    first = tl.program_id(1) * ROWS
    expert = tl.load(expert_ptr + first).to(tl.int64)
    while expert >= 0:  # tiles of nobody come last
        places = first + tl.arange(0, ROWS).to(tl.int64)
        source = tl.load(source_ptr + places).to(tl.int64)
        inside = source >= 0
        tile = expert * tl.num_programs(0) + tl.program_id(0)
        both = lift * _multiply(x_ptr, source, inside, words_ptr, factor_ptr, tile, K, WHOLE, ROWS, PLAIN)
        rounded = tl.reshape(both.to(tl.bfloat16), (2, HALF, ROWS)).to(tl.float32)
        gate, up = tl.split(tl.permute(rounded, (2, 1, 0)))
        weight = tl.load(weights_ptr + tl.load(copy_ptr + places), mask=inside, other=0.0)
        hidden = (weight[:, None] * swiglu(gate, up, limit)).to(tl.bfloat16)
        if QUANTISE:
            hidden = round_fp8(hidden.to(tl.float32), ROWS, HALF).to(tl.bfloat16)
        columns = tl.program_id(0) * HALF + tl.arange(0, HALF)
        wanted = inside[:, None] & (columns < N)[None, :]
        tl.store(out_ptr + places[:, None] * N + columns[None, :], hidden, mask=wanted)
        first += tl.num_programs(1) * ROWS
        expert = tl.load(expert_ptr + first, mask=first < num_places, other=-1).to(tl.int64)


@triton.jit
def _grouped_down_kernel(
    x_ptr,
    words_ptr,
    factor_ptr,
    out_ptr,
    expert_ptr,
    source_ptr,
    num_places,
    lift,
    N: tl.constexpr,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """128 columns of what an expert answers to a tile of its rows, which lie in their places."""
    first = tl.program_id(1) * ROWS
    expert = tl.load(expert_ptr + first).to(tl.int64)
    while expert >= 0:  # tiles of nobody come last
        places = first + tl.arange(0, ROWS).to(tl.int64)
        inside = tl.load(source_ptr + places) >= 0
        tile = expert * tl.num_programs(0) + tl.program_id(0)
        total = lift * _multiply(x_ptr, places, inside, words_ptr, factor_ptr, tile, K, WHOLE, ROWS, PLAIN)
        columns = tl.program_id(0) * _TILE_ROWS + tl.arange(0, _TILE_ROWS)
        wanted = inside[:, None] & (columns < N)[None, :]
        tl.store(out_ptr + places[:, None] * N + columns[None, :], tl.trans(total), mask=wanted)
        first += tl.num_programs(1) * ROWS
        expert = tl.load(expert_ptr + first, mask=first < num_places, other=-1).to(tl.int64)


@dataclass(slots=True, frozen=True)
class Fp4Experts:
    """Packed weights: `gate_up` has 64 rows of gate, then 64 of up in a tile. D and I: `ops.ExpertMLP`."""

    gate_up: Fp4Tiles
    down: Fp4Tiles
    hidden: int  # D
    width: int  # I


@dataclass(slots=True, frozen=True)
class _Tiles:
    """How copies are cut: rows of a tile, as many as an expert is expected to get, rounded up to a power of two; and
    programs that go through the tiles, one for each that is expected."""

    rows: int
    programs: int


@dataclass(slots=True, frozen=True)
class ExpertMLP:
    """`ops.ExpertMLP` in bf16."""

    numerics: Numerics

    def prepare(
        self,
        gate: Tensor,
        gate_scale: Tensor,
        up: Tensor,
        up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        *,
        few_rows: bool = False,  # noqa: ARG002  packed in any case
    ) -> Fp4Experts:
        gate_up = pack_fp4((gate, gate_scale), (up, up_scale))
        return Fp4Experts(gate_up, pack_fp4((down, down_scale)), down.shape[1], gate.shape[1])

    def pack(self, activations: Activations, experts: Fp4Experts) -> Tensor:  # noqa: ARG002
        return activations.values

    def __call__(
        self,
        rows: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        experts: Fp4Experts,
        *,
        limit: float,
        expected_copies: int | None = None,
    ) -> ExpertRows:
        num_experts = len(experts.down.words)
        tiles = _tiles(expert_ids.numel(), num_experts, expected_copies)
        layout = lay_out_experts(expert_ids, num_experts=num_experts, tile=tiles.rows)
        if not layout.num_places:
            return ExpertRows(rows[:0], layout.places)
        x = fp8_values(rows) if self.numerics.quantise_activations else rows.contiguous()
        hidden = self._gate_up(x, weights, experts, layout, tiles, limit)
        return ExpertRows(self._down(hidden, experts, layout, tiles), layout.places)

    def _gate_up(
        self, x: Tensor, weights: Tensor, experts: Fp4Experts, layout: ExpertLayout, cut: _Tiles, limit: float
    ) -> Tensor:
        """[P, I] in the padded places; those of no row are unwritten."""
        out = torch.empty(layout.num_places, experts.width, dtype=x.dtype, device=x.device)
        tiles = experts.gate_up
        _grouped_gate_up_kernel[(tiles.words.shape[1], cut.programs)](
            x,
            tiles.words,
            tiles.factors,
            out,
            layout.expert,
            layout.source,
            layout.copy,
            weights.contiguous(),
            layout.num_places,
            limit,
            tiles.lift,
            N=experts.width,
            K=experts.hidden,
            WHOLE=experts.hidden % BLOCK == 0,
            ROWS=cut.rows,
            QUANTISE=self.numerics.quantise_activations,
            PLAIN=not x.is_cuda,
            num_warps=_WARPS,
        )
        return out

    def _down(self, hidden: Tensor, experts: Fp4Experts, layout: ExpertLayout, cut: _Tiles) -> Tensor:
        """[P, D], likewise."""
        out = torch.empty(layout.num_places, experts.hidden, dtype=hidden.dtype, device=hidden.device)
        tiles = experts.down
        _grouped_down_kernel[(tiles.words.shape[1], cut.programs)](
            hidden,
            tiles.words,
            tiles.factors,
            out,
            layout.expert,
            layout.source,
            layout.num_places,
            tiles.lift,
            N=experts.hidden,
            K=experts.width,
            WHOLE=experts.width % BLOCK == 0,
            ROWS=cut.rows,
            PLAIN=not hidden.is_cuda,
            num_warps=_WARPS,
        )
        return out


def _tiles(num_copies: int, num_experts: int, expected_copies: int | None) -> _Tiles:
    expected = num_copies if expected_copies is None else min(expected_copies, num_copies)
    rows = min(_MAX_TILE, max(_MIN_TILE, triton.next_power_of_2(-(-expected // num_experts))))
    return _Tiles(rows, expected // rows + min(num_experts, num_copies))


IMPLEMENTATIONS = (triton_kernel("expert_mlp", ExpertMLP, dtypes=BF16),)
