"""RMS norm and rotary embedding in float32 with one rounding at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.reference.abilities import implementation


@dataclass(slots=True, frozen=True)
class RMSNorm:
    """`ops.RMSNorm`."""

    numerics: Numerics

    def __call__(self, x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
        values = x.float()
        inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
        return (weight.float() * (values * inverse)).to(self.numerics.dtype)


@dataclass(slots=True, frozen=True)
class Rotate:
    """`ops.Rotate`."""

    numerics: Numerics

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, *, inverse: bool = False) -> Tensor:
        num_pairs = cosine.shape[1]
        shape = (x.shape[0], *(1,) * (x.dim() - 2), num_pairs)
        cosine, sine = cosine.view(shape), sine.view(shape)
        sine = -sine if inverse else sine
        kept = x.shape[-1] - 2 * num_pairs
        even, odd = x[..., kept:].float().unflatten(-1, (num_pairs, 2)).unbind(-1)
        turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)
        return torch.cat((x[..., :kept].to(self.numerics.dtype), turned.to(self.numerics.dtype)), -1)


IMPLEMENTATIONS = (implementation("rms_norm", RMSNorm), implementation("rotate", Rotate))
