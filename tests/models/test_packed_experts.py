"""Where prompts are cut short, the experts behind the cut see few rows and are told so when they are prepared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden_case import mode_kernels

from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.random_weights import random_weights

W16 = Path(__file__).parents[1] / "golden" / "w16"


class _Noting:
    """An expert op that notes what its layers were prepared for."""

    def __init__(self) -> None:
        self.few_rows: list[bool] = []

    def prepare(self, *weights: torch.Tensor, few_rows: bool = False) -> Any:
        self.few_rows.append(few_rows)


@pytest.mark.parametrize(
    ("keep_tokens", "batch_invariant", "is_packed"), [(28, False, True), (None, False, False), (28, True, False)]
)
def test_layers_behind_the_cut(keep_tokens: int | None, batch_invariant: bool, is_packed: bool) -> None:
    config, noting = read_config(W16), _Noting()
    kernels = dataclasses.replace(mode_kernels("ref"), expert_mlp=noting, batch_invariant=batch_invariant)
    weights = random_weights(config, expert_ids=(0,), draft=None, device=torch.device("cpu"), tables="host")
    DeepseekV41(config, weights, torch.zeros(config.vocab_size, dtype=torch.int64), kernels, keep_tokens=keep_tokens)
    first = config.first_decoder_layer
    assert 0 < first < config.num_layers
    assert noting.few_rows == [is_packed and layer >= first for layer in range(config.num_layers)]
