"""Everything that a step tells the device, in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.platforms.transfer import to_device

Column = npt.NDArray[Any]


def send_together(columns: dict[str, Column], device: torch.device) -> dict[str, torch.Tensor]:
    """Return flat `columns` on `device` by name, as int64, or float64 where they hold floats."""
    packed = [_as_words(column) for column in columns.values()]
    words = to_device(np.concatenate(packed) if packed else np.zeros(0, np.int64), device)
    sent, start = {}, 0
    for name, column in columns.items():
        part = words[start : start + column.size]
        sent[name] = part.view(torch.float64) if column.dtype.kind == "f" else part
        start += column.size
    return sent


def _as_words(column: Column) -> npt.NDArray[np.int64]:
    assert column.ndim == 1, column.shape
    if column.dtype.kind == "f":
        return column.astype(np.float64).view(np.int64)
    return column.astype(np.int64)
