"""What every reference kernel declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.registry import Implementation


def implementation(op: str, build: Callable[[Numerics], Any]) -> Implementation:
    """Declare a reference kernel: CPU and CUDA, bf16 and float32.

    Batch-invariance is tested on the CPU; on CUDA the same shapes go to the same library calls, which is all we say.
    """
    return Implementation(
        op=op,
        build=build,
        device_types=("cpu", "cuda"),
        dtypes=(torch.bfloat16, torch.float32),
        batch_invariant=True,
    )
