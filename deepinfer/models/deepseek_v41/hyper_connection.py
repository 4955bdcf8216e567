"""Residual streams around a sublayer: collapse, run, update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deepinfer.kernels.ops import Activations, ExpertSum, MixCoefficients
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.weight_types import HyperConnectionWeights
from deepinfer.platforms.side_stream import HeldWork, SideStream


@dataclass(slots=True, frozen=True)
class Update:
    """A sublayer's output `y` [T, D], perhaps not added up yet, and how it enters the streams: `ops.UpdateStreams`."""

    y: Tensor | ExpertSum
    post: Tensor
    mix: Tensor


@dataclass(slots=True, frozen=True)
class Residual:
    """Streams [T, M, D] between two sublayers, and `pre` [T, M], which collapses them for the next one.

    `update` is the last sublayer's, not yet in the streams: it goes in together with what the next sublayer needs.
    """

    streams: Tensor
    pre: Tensor
    update: Update | None = None

    def settled(self, kernels: KernelSet) -> Residual:
        """The same with the update in the streams."""
        update = self.update
        if update is None:
            return self
        y = update.y
        if isinstance(y, ExpertSum):
            y = kernels.combine_experts(y.rows, y.shared)
        return Residual(kernels.update_streams(self.streams, y, update.post, update.mix), self.pre)


Sublayer = Callable[[Activations, HeldWork[MixCoefficients]], Tensor | ExpertSum]


class HyperConnection:
    """Mixing of one sublayer. Its `pre` coefficients collapse the streams for the NEXT sublayer, not for its own."""

    def __init__(
        self, config: ModelConfig, weights: HyperConnectionWeights, norm: Tensor, kernels: KernelSet, side: SideStream
    ) -> None:
        """`side` computes the coefficients, which are needed behind the sublayer only."""
        self.weights, self.norm, self.kernels, self.side = weights, norm, kernels, side
        self.function = kernels.mix_coefficients.prepare(weights.fn)
        self.epsilon, self.mix_epsilon = config.rms_norm_eps, config.hc_eps
        self.num_iterations = config.hc_sinkhorn_iters

    def __call__(self, residual: Residual, sublayer: Sublayer, *, kept: Tensor | None = None) -> Residual:
        """Run `sublayer` ([T, D] -> [T, D]) on the normalised collapse of the streams; its update is left pending.

        It is also given the work on the coefficients, to start it where the device has room. `kept` [K]: the only rows
        that `sublayer` answers for and that go on, by number.
        """
        streams, hidden = self._enter(residual)
        if kept is not None:
            streams = streams[kept]
        mixing = self.side.hold(lambda: self._coefficients(streams))
        y = sublayer(hidden, mixing)
        coefficients = mixing.wait()
        return Residual(streams, coefficients.pre, Update(y, coefficients.post, coefficients.mix))

    def _coefficients(self, streams: Tensor) -> MixCoefficients:
        weights = self.weights
        return self.kernels.mix_coefficients(
            streams,
            self.function,
            weights.scale,
            weights.base,
            epsilon=self.epsilon,
            mix_epsilon=self.mix_epsilon,
            num_iterations=self.num_iterations,
        )

    def _enter(self, residual: Residual) -> tuple[Tensor, Activations]:
        """The settled streams [T, M, D] and the sublayer's input [T, D]."""
        kernels, update = self.kernels, residual.update
        if update is None:
            collapsed = kernels.collapse_streams(residual.streams, residual.pre)
            return residual.streams, Activations(kernels.rms_norm(collapsed, self.norm, epsilon=self.epsilon))
        return kernels.advance_streams(
            residual.streams,
            update.y,
            update.post,
            update.mix,
            residual.pre,
            self.norm,
            epsilon=self.epsilon,
            with_cast=kernels.quantized_linear.reads_casts,
        )
