"""The choice of experts in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.nvidia.gemm import matmul_parts

_LOWEST = tl.constexpr(-(2**31))  # below the key of every number


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), accurate where the exponential is far below 1; x itself above 20."""
    small = tl.exp(-tl.abs(x))
    one = 1.0 + small
    # log1p without its function: the quotient undoes the rounding of 1 + small
    shifted = tl.where(one == 1.0, small, tl.log(one) * tl.div_rn(small, tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0) + shifted)


@triton.jit
def _order_key(values):
    """int32 in the order of float32 `values`."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    padding_ptr,
    ids_ptr,
    weights_ptr,
    part_stride,
    scale,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One row, one warp: it reduces integers in one instruction each."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    inside = experts < EXPERTS
    logits_ptr += row * EXPERTS + experts
    logits = tl.load(logits_ptr, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(logits_ptr + part * part_stride, mask=inside, other=0.0)
    scores = tl.sqrt_rn(_softplus(logits))
    biased = scores + tl.load(bias_ptr + experts, mask=inside, other=0.0)
    keys = _order_key(tl.where(biased == biased, biased, float("-inf")))  # unusable rows still get ids in range
    keys = tl.where(inside, keys, _LOWEST)
    bits = scores.to(tl.int32, bitcast=True)
    slots = tl.arange(0, SLOTS)
    ids = tl.full((SLOTS,), BLOCK, tl.int32)
    chosen = tl.zeros((SLOTS,), tl.float32)
    total = 0.0
    for slot in tl.static_range(CHOSEN):
        best = tl.max(keys, 0)
        expert = tl.min(tl.where(keys == best, experts, BLOCK), 0)
        score = tl.max(tl.where(experts == expert, bits, _LOWEST), 0).to(tl.float32, bitcast=True)
        keys = tl.where(experts == expert, _LOWEST, keys)
        ids = tl.where(slots == slot, expert, ids)
        chosen = tl.where(slots == slot, score, chosen)
        total += score
    place = row * CHOSEN + tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), 1)
    weight = tl.div_rn(chosen, tl.full((SLOTS,), 1e-20, tl.float32) + total) * scale
    padding = tl.load(padding_ptr + row).to(tl.int32)
    used = slots < CHOSEN
    tl.store(ids_ptr + place, tl.where(padding != 0, -1, ids).to(tl.int64), mask=used)
    tl.store(weights_ptr + place, weight, mask=used)


def choose_experts(
    parts: Tensor, bias: Tensor, is_padding: Tensor, *, num_chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The choice of `ops.RouteTokens` from logits in float32 parts [P, T, E], which are added in their order.

    The sum of the chosen scores runs from the best expert down.
    """
    num_parts, num_rows, num_experts = parts.shape
    ids = torch.empty(num_rows, num_chosen, dtype=torch.int64, device=parts.device)
    weights = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=parts.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            parts.contiguous(),
            bias,
            is_padding.contiguous().view(torch.uint8),
            ids,
            weights,
            num_rows * num_experts,
            scale,
            PARTS=num_parts,
            EXPERTS=num_experts,
            CHOSEN=num_chosen,
            BLOCK=triton.next_power_of_2(num_experts),
            SLOTS=triton.next_power_of_2(num_chosen),
            num_warps=1,
        )
    return ids, weights


@dataclass(slots=True, frozen=True)
class RouteTokens:
    """`ops.RouteTokens`; the prepared router is bf16 [E, D]."""

    def prepare(self, router: Tensor) -> Tensor:
        return router

    def __call__(
        self, hidden: Tensor, router: Tensor, bias: Tensor, is_padding: Tensor, *, num_chosen: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        parts = matmul_parts(hidden, router.to(hidden.dtype))
        return choose_experts(parts, bias, is_padding, num_chosen=num_chosen, scale=scale)


IMPLEMENTATIONS = (triton_kernel("route_tokens", lambda _: RouteTokens()),)
