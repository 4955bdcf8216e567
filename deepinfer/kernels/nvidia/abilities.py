"""What every Triton kernel of this folder declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.registry import Implementation

BOTH = (torch.bfloat16, torch.float32)
BF16 = (torch.bfloat16,)
VERIFIED = ("sm_90",)


def triton_kernel(
    op: str,
    build: Callable[[Numerics], Any],
    *,
    dtypes: tuple[torch.dtype, ...] = BOTH,
    released_numerics_only: bool = False,
) -> Implementation:
    """Declare a Triton kernel. All of them handle each row by itself in a fixed order: they are batch-invariant."""
    return Implementation(
        op=op,
        build=build,
        device_types=("cuda",),
        dtypes=dtypes,
        batch_invariant=True,
        released_numerics_only=released_numerics_only,
        package="triton",
        verified_chips=VERIFIED,
    )
