"""Copies between host and device that nobody waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(data: npt.NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `data`, which lies in host memory, on `device`; the caller gives it up.

    The copy stands in the current stream. torch keeps the pinned memory until it has happened.
    """
    tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(data))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` in host memory, which holds it once the current stream has come that far."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def to_host_together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `to_host` of each, all of them in one copy."""
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # parts begin at multiples of their items
    rest = to_host(torch.cat([tensors[name].contiguous().flatten().view(torch.uint8) for name in names]))
    copies = {}
    for name in names:
        tensor = tensors[name]
        part, rest = rest.split((tensor.nbytes, len(rest) - tensor.nbytes))
        copies[name] = part.view(tensor.dtype).view(tensor.shape)
    return copies
