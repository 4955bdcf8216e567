"""Two quantised maps of one input, stacked so that the input is cast and multiplied once."""

from __future__ import annotations

import torch

from deepinfer.models.deepseek_v41.config import QUANT_BLOCK
from deepinfer.models.deepseek_v41.weight_types import QuantizedLinear


def stack_rows(first: QuantizedLinear, second: QuantizedLinear) -> QuantizedLinear:
    """Return the map whose outputs are those of `first`, then those of `second`."""
    rows = first.weight.shape[0]
    assert rows % QUANT_BLOCK == 0, f"{rows} rows: a scale tile would cover both maps"
    weight = torch.cat((first.weight.view(torch.uint8), second.weight.view(torch.uint8)))
    return QuantizedLinear(weight.view(first.weight.dtype), torch.cat((first.scale, second.scale)))
