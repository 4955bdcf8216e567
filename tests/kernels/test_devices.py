"""Ops whose operands live on different devices, with tensors that have a device but no data: no GPU needed."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer.kernels.ops import REFERENCE_NUMERICS
from deepinfer.kernels.reference.engram import EngramLookup


def test_the_engram_table_may_stay_in_host_memory() -> None:
    with FakeTensorMode():
        rows = torch.zeros(5, 3, dtype=torch.int64, device="cuda")
        table = torch.zeros(100, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.zeros(100, 2, dtype=torch.uint8)
        found = EngramLookup(REFERENCE_NUMERICS)(rows, table, scale)
    assert (found.device.type, tuple(found.shape), found.dtype) == ("cuda", (5, 192), torch.bfloat16)
