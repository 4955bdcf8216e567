"""Manifold-constrained hyper-connections: mixing coefficients with Sinkhorn, and the two uses of them.

Sums over the few residual streams are written out, so their order is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import Activations, ExpertSum, MixCoefficients, Numerics
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.elementwise import sigmoid
from deepinfer.kernels.reference.matmul import matmul_rows
from deepinfer.kernels.reference.moe import CombineExperts
from deepinfer.kernels.reference.norm import RMSNorm


@dataclass(slots=True, frozen=True)
class MixCoefficientsOf:
    """`ops.MixCoefficientsOf`."""

    def prepare(self, function: Tensor) -> Tensor:
        return function

    def __call__(
        self,
        streams: Tensor,
        function: Tensor,
        scale: Tensor,
        base: Tensor,
        *,
        epsilon: float,
        mix_epsilon: float,
        num_iterations: int,
    ) -> MixCoefficients:
        num = streams.shape[1]
        assert num <= 4, f"{num} streams: sums of more than 4 would depend on the batch"
        flat = streams.flatten(1).float()
        inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + epsilon)
        scores = matmul_rows(flat, function) * inverse
        pre = sigmoid(scores[:, :num] * scale[0] + base[:num]) + mix_epsilon
        post = 2.0 * sigmoid(scores[:, num : 2 * num] * scale[1] + base[num : 2 * num])
        logits = scores[:, 2 * num :] * scale[2] + base[2 * num :]
        # rows last: [from, to, T], so that each step of the iteration is one operation on whole rows
        mix = _sinkhorn(logits.t().contiguous().view(num, num, -1), mix_epsilon, num_iterations)
        return MixCoefficients(pre, post, mix.permute(2, 0, 1).contiguous())


def _sinkhorn(logits: Tensor, epsilon: float, num_iterations: int) -> Tensor:
    mix = torch.exp(logits - logits.amax(1, keepdim=True))
    mix = mix / _sum(mix, 1) + epsilon
    mix /= _sum(mix, 0).add_(epsilon)
    for _ in range(num_iterations - 1):
        mix /= _sum(mix, 1).add_(epsilon)
        mix /= _sum(mix, 0).add_(epsilon)
    return mix


def _sum(x: Tensor, axis: int) -> Tensor:
    """Sum along an axis of at most four, kept. torch adds so few in order, whatever stands beside them."""
    return x.sum(axis, keepdim=True)


@dataclass(slots=True, frozen=True)
class OpenStreams:
    """`ops.OpenStreams`."""

    numerics: Numerics

    def __call__(self, embedding: Tensor, token_ids: Tensor, *, num_streams: int) -> tuple[Tensor, Tensor]:
        each = token_ids.unsqueeze(1).expand(-1, num_streams)
        streams = embedding[each].to(self.numerics.dtype)  # gathered once for each stream: copies take far longer
        pre = torch.zeros(len(token_ids), num_streams, device=embedding.device)
        pre[:, 0] = 1.0
        return streams, pre


@dataclass(slots=True, frozen=True)
class CollapseStreams:
    """`ops.CollapseStreams`."""

    numerics: Numerics

    def __call__(self, streams: Tensor, pre: Tensor) -> Tensor:
        return _weighted_sum(streams, pre).to(self.numerics.dtype)


@dataclass(slots=True, frozen=True)
class UpdateStreams:
    """`ops.UpdateStreams`."""

    numerics: Numerics

    def __call__(self, streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        added = post.unsqueeze(-1) * y.float().unsqueeze(1)
        values = streams.float()
        mixed = values[:, :1] * mix[:, 0].unsqueeze(-1)
        for source in range(1, streams.shape[1]):
            mixed += values[:, source : source + 1] * mix[:, source].unsqueeze(-1)
        return (added + mixed).to(self.numerics.dtype)


@dataclass(slots=True, frozen=True)
class AdvanceStreams:
    """`ops.AdvanceStreams`: the single ops one after the other."""

    numerics: Numerics

    def __call__(
        self,
        streams: Tensor,
        y: Tensor | ExpertSum,
        post: Tensor,
        mix: Tensor,
        pre: Tensor,
        weight: Tensor,
        *,
        epsilon: float,
        with_cast: bool = False,  # noqa: ARG002
    ) -> tuple[Tensor, Activations]:
        if isinstance(y, ExpertSum):
            y = CombineExperts(self.numerics)(y.rows, y.shared)
        streams = UpdateStreams(self.numerics)(streams, y, post, mix)
        collapsed = CollapseStreams(self.numerics)(streams, pre)
        return streams, Activations(RMSNorm(self.numerics)(collapsed, weight, epsilon=epsilon))


def _weighted_sum(streams: Tensor, weights: Tensor) -> Tensor:
    total = streams[:, 0].float() * weights[:, :1]
    for stream in range(1, streams.shape[1]):
        total += streams[:, stream].float() * weights[:, stream : stream + 1]
    return total


IMPLEMENTATIONS = (
    implementation("mix_coefficients", lambda _: MixCoefficientsOf()),
    implementation("open_streams", OpenStreams),
    implementation("collapse_streams", CollapseStreams),
    implementation("update_streams", UpdateStreams),
    implementation("advance_streams", AdvanceStreams),
)
