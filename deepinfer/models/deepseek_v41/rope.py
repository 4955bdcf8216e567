"""Rotary frequencies: plain on window-only layers, YaRN with the larger base on all others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.config import ModelConfig


@dataclass(slots=True, frozen=True)
class Rotation:
    """`cosine`, `sine` float32 [n, R / 2] of n positions."""

    cosine: Tensor
    sine: Tensor


def window_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """float32 [R / 2] for layers with compress ratio 0: no YaRN."""
    return _base_frequencies(config.rope_theta, config.qk_rope_head_dim, device)


def compressed_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """float32 [R / 2] for layers with a compressed cache: YaRN at every length, not only beyond the original one."""
    width = config.qk_rope_head_dim
    frequencies = _base_frequencies(config.compress_rope_theta, width, device)
    low = max(math.floor(_turning_channel(config, config.rope_beta_fast)), 0)
    high = min(math.ceil(_turning_channel(config, config.rope_beta_slow)), width - 1)
    channels = torch.arange(width // 2, dtype=torch.float32, device=device)
    ramp = ((channels - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / config.rope_factor * ramp + frequencies * (1 - ramp)


def _turning_channel(config: ModelConfig, num_turns: float) -> float:
    """Channel pair that turns `num_turns` times within the original context length."""
    length, base = config.rope_original_max_position_embeddings, config.compress_rope_theta
    return config.qk_rope_head_dim * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(base))


def _base_frequencies(base: float, width: int, device: torch.device) -> Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return 1.0 / (base**exponents)
