"""Which kind of work a kernel does, told by its name: graphs keep nothing else of the operation that launched it.

Products of one shape class share a kernel, so some kinds are wider than an operation.
"""

from __future__ import annotations

import re
from typing import Final

OTHER: Final = "other"

# the first pattern that is found decides
_KINDS: Final = (
    (r"^_step_", "rows of a step and their lists"),
    (r"fp8_gemm.*?\D0, 0u, [1-9]\d*u, [1-9]\d*u, [1-9]|_grouped_", "routed experts"),
    (r"fp8_gemm", "FP8 linears"),
    (r"bf16_gemm", "attention output by groups"),
    (r"sparse_attn|attention|_numbers_", "attention"),
    (r"_scan_|_kept_|_choose_|_score|_maxima|_query_|_locate_|index_select|mqa_logits", "index scores and selection"),
    (r"_swiglu", "SwiGLU"),
    (r"_cast_", "casts to FP8"),
    (r"_product_|_coefficients_|_advance_|_update_|_collapse_|_open_streams_", "hyper-connections"),
    (r"nvjet|cublas|cutlass|gemm|_matmul_|_sum_parts_", "bf16 products: router, heads, compressors"),
    (r"_place_|_count_|_combine_|_route_|_layout_", "routing, order and sum of experts' rows"),
    (r"_draw_", "sampling"),
    (r"_rotate_|_latent_|_rms_norm_|_norm_|_store_|pack_|_pair_|_round_", "norms, rotation, records"),
    (r"_rows_kernel|_lookup_|_gate_kernel", "n-gram memory"),
    (r"Memcpy|Memset|memcpy", "copies"),
    (r"at::native|at_cuda|cub::", "torch's own small kernels"),
)
# kind -> what it is counted as in the model's costs, draft included
COST_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "routed experts": ("routed experts",),
    "FP8 linears": ("attention linears", "shared expert", "index linears", "n-gram memory", "ring keys"),
    "attention output by groups": ("attention output by groups",),
    "attention": ("attention",),
    "index scores and selection": ("index scores and selection",),
    "hyper-connections": ("hyper-connections",),
    "bf16 products: router, heads, compressors": ("router", "head", "compressors", "Markov head"),
    "routing, order and sum of experts' rows": ("sum of experts",),
    "sampling": ("sampling",),
}


def kind_of(kernel: str) -> str:
    """Return the kind of the kernel with this name."""
    return next((kind for pattern, kind in _KINDS if re.search(pattern, kernel)), OTHER)
