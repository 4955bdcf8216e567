"""What the dispatcher in plain torch makes of the bytes that arrive; test_process_groups compares whole exchanges."""

from __future__ import annotations

import pytest
import torch

from deepinfer.distributed.torch_dispatcher import _join, _split


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_any_number_of_rows_arrives_whole(num_rows: int, dtype: torch.dtype) -> None:
    rows = torch.arange(num_rows * 3).view(num_rows, 3).to(dtype)
    weights = torch.arange(num_rows) / 7
    found_rows, found_weights = _split(_join(rows, weights), rows)
    assert found_rows.dtype == dtype
    assert torch.equal(found_rows.view(torch.uint8), rows.view(torch.uint8))
    assert torch.equal(found_weights, weights)
