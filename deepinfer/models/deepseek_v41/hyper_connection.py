"""Residual streams around a sublayer: collapse, run, update."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.weight_types import HyperConnectionWeights


def open_streams(rows: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
    """Return equal streams [T, M, D] of the embedded `rows` [T, D], and the first `pre` [T, M]: stream 0 alone."""
    pre = torch.zeros(len(rows), num_streams, device=rows.device)
    pre[:, 0] = 1.0
    return rows.unsqueeze(1).repeat(1, num_streams, 1), pre


class HyperConnection:
    """Mixing of one sublayer. Its `pre` coefficients collapse the streams for the NEXT sublayer, not for its own."""

    def __init__(self, config: ModelConfig, weights: HyperConnectionWeights, norm: Tensor, kernels: KernelSet) -> None:
        self.weights, self.norm, self.kernels = weights, norm, kernels
        self.epsilon, self.mix_epsilon = config.rms_norm_eps, config.hc_eps
        self.num_iterations = config.hc_sinkhorn_iters

    def __call__(
        self, streams: Tensor, pre: Tensor, sublayer: Callable[[Tensor], Tensor], *, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run `sublayer` ([T, D] -> [T, D]) on the normalised collapse of `streams` [T, M, D] by `pre` [T, M].

        Returns the updated streams and the `pre` of the next sublayer. `kept` [K]: the only rows that `sublayer`
        answers for and that go on, by number.
        """
        kernels, weights = self.kernels, self.weights
        hidden = kernels.rms_norm(kernels.collapse_streams(streams, pre), self.norm, epsilon=self.epsilon)
        if kept is not None:
            streams = streams[kept]
        coefficients = kernels.mix_coefficients(
            streams,
            weights.fn,
            weights.scale,
            weights.base,
            epsilon=self.epsilon,
            mix_epsilon=self.mix_epsilon,
            num_iterations=self.num_iterations,
        )
        streams = kernels.update_streams(streams, sublayer(hidden), coefficients.post, coefficients.mix)
        return streams, coefficients.pre
