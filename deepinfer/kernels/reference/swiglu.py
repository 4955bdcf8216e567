"""The gated activation of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.reference.elementwise import sigmoid


@dataclass(slots=True, frozen=True)
class SwiGLU:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) [* weights[:, None]] in float32 -> model dtype. [T, I]."""

    numerics: Numerics

    def __call__(self, gate: Tensor, up: Tensor, *, limit: float, weights: Tensor | None = None) -> Tensor:
        opened = gate.float().clamp_max(limit)
        values = opened * sigmoid(opened) * up.float().clamp(-limit, limit)
        if weights is not None:
            values = weights.unsqueeze(1) * values
        return values.to(self.numerics.dtype)
