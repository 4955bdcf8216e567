"""What Triton 3.6 leaves out between copies into shared memory and the products that read it there."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fence_copies(PLAIN: tl.constexpr):
    """To stand before the first product of a turn whose operands were copied ahead. PLAIN: not for a GPU.

    Hopper's products read shared memory by another way than copies (`cp.async`) write it; that these have ended does
    not put one behind the other. Later releases of Triton see to it themselves.
    """
    if not PLAIN:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
