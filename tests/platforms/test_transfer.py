"""Copies to the host."""

from __future__ import annotations

import pytest
import torch

from deepinfer.platforms.transfer import to_host_together


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_travels_together_comes_back_apart(device: str) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "numbers": torch.tensor([[1, -2], [3, 2**40]]),
        "nothing": torch.zeros(2, 0, dtype=torch.int64),
        "values": torch.tensor([0.5, -torch.inf, 3.0]),
        "strided": torch.arange(12).view(3, 4)[:, ::2],
    }
    given = {name: tensor.clone().to(device) for name, tensor in tensors.items()}
    copies = to_host_together(given)
    if device == "cuda":
        torch.cuda.synchronize()
    given["numbers"].zero_()
    assert copies.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert copies[name].dtype == tensor.dtype
        assert torch.equal(copies[name], tensor), name
