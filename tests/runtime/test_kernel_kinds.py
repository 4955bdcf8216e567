"""Kinds of kernels by their names, as torch's profiler gives them."""

from __future__ import annotations

import pytest

from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.step_costs import DRAFT, decode_shape, step_costs
from deepinfer.runtime.bench.kernel_kinds import COST_NAMES, OTHER, kind_of

GEMM = "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, {}u, {}u, {}u, 128u, 80u, 1"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GEMM.format(4608, 5120, 6), "routed experts"),
        (GEMM.format(0, 0, 1), "FP8 linears"),
        ("void deep_gemm::sm90_bf16_gemm_impl<(cute::UMMA::Major)0", "attention output by groups"),
        ("void legacy::sm90::prefill::sparse_fwd::sparse_attn_fwd_kernel<legacy", "attention"),
        ("_swiglu_cast_kernel", "SwiGLU"),
        ("_cast_kernel", "casts to FP8"),
        ("_step_layout_kernel", "rows of a step and their lists"),
        ("_earlier_count_kernel", "routing, order and sum of experts' rows"),
        ("_sum_parts_kernel", "bf16 products: router, heads, compressors"),
        ("nvjet_sm90_tss_128x160_64x5_2x1_v_bz_TNT", "bf16 products: router, heads, compressors"),
        ("void at::native::vectorized_elementwise_kernel<2, at::native::where", "torch's own small kernels"),
        ("something_new", OTHER),
    ],
)
def test_kind_of(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_cost_is_counted_in_one_kind() -> None:
    shape = decode_shape(num_requests=4, context=1024, num_drafts=3, num_ranks=64)
    names = {cost.name.removeprefix(DRAFT) for cost in step_costs(released_config(), shape)}
    counted = [name for group in COST_NAMES.values() for name in group]
    assert sorted(counted) == sorted(names)
