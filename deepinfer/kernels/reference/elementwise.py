"""Functions whose bits do not depend on an element's place in memory.

torch's own sigmoid, silu and softplus use vector code in the middle of an array and scalar code at its end, with other
last bits (torch 2.13 on a CPU); exp and log1p do not, so everything here is built on those two.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32; 0 below about -88, where the exponential overflows."""
    return 1.0 / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), float32, stable on both sides; x itself above 20."""
    stable = x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
    return torch.where(x > 20.0, x, stable)
