"""Draft rings: the keys that the draft stages see of the context, made from the target's own features.

Written by every target pass for all its rows, like a layer's window ring, so rejected drafts are undone in the same
way: their rows are written again before anyone reads them. The equations are those of the released reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.caches import Caches
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.step_rows import StepRows
from deepinfer.models.deepseek_v41.weight_types import DraftRingWeights, QuantizedLinear


class FeatureTap:
    """Collects the mean of the residual streams at the ENTRY of each tapped layer, in layer order."""

    def __init__(self, layers: Sequence[int], kernels: KernelSet) -> None:
        self.layers, self._kernels = layers, kernels
        self._features: list[Tensor] = []

    def __call__(self, layer: int, streams: Tensor) -> None:
        """Take the streams [T, M, D] that are about to enter `layer`."""
        if layer in self.layers:
            num_rows, num_streams, _ = streams.shape
            equal = torch.full((num_rows, num_streams), 1 / num_streams, device=streams.device)
            self._features.append(self._kernels.collapse_streams(streams, equal))

    def keep(self, kept: Tensor) -> None:
        """Go on with the rows `kept` [K] only."""
        self._features = [features[kept] for features in self._features]

    def features(self) -> Tensor:
        """Return [T, taps * D]: what was collected, side by side."""
        assert len(self._features) == len(self.layers), f"{len(self._features)} of {len(self.layers)} layers tapped"
        return torch.cat(self._features, 1)


class DraftRings:
    """Projects features to each stage's keys and stores them; a rank that never drafts needs only this."""

    def __init__(self, config: ModelConfig, weights: DraftRingWeights, kernels: KernelSet) -> None:
        def prepare(linear: QuantizedLinear) -> object:
            return kernels.quantized_linear.prepare(linear.weight, linear.scale)

        self.kernels, self.epsilon, self.tapped_layers = kernels, config.rms_norm_eps, config.dspark_target_layer_ids
        self.feature_weight, self.feature_norm = prepare(weights.main_proj), weights.main_norm
        self.key_weights, self.key_norms = [prepare(linear) for linear in weights.wkv], weights.kv_norm

    def tap(self) -> FeatureTap:
        """Return a fresh tap for one pass."""
        return FeatureTap(self.tapped_layers, self.kernels)

    def store(self, features: Tensor, rows: StepRows, caches: Caches) -> None:
        """Write what the rings keep of `features` [T, taps * D]; `rows` are the index lists of these T rows."""
        kernels, rotation = self.kernels, rows.window_rotation
        context = self.context(features)
        for ring, weight, norm in zip(caches.draft, self.key_weights, self.key_norms, strict=True):
            keys = kernels.rms_norm(kernels.quantized_linear(context, weight), norm, epsilon=self.epsilon)
            keys = kernels.rotate(keys, rotation.cosine, rotation.sine)
            kernels.store_rows(ring, rows.ring_targets, caches.layout.window_record.pack(keys))

    def context(self, features: Tensor) -> Tensor:
        """Return [T, D]: the input that all stages share."""
        projected = self.kernels.quantized_linear(features, self.feature_weight)
        return self.kernels.rms_norm(projected, self.feature_norm, epsilon=self.epsilon)
