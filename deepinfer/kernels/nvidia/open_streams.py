"""The first residual streams in Triton: an embedded row is read once and written for each stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.ops import Numerics

_BLOCK = 1024


@triton.jit
def _open_streams_kernel(
    embedding_ptr,
    tokens_ptr,
    streams_ptr,
    pre_ptr,
    NUM: tl.constexpr,
    NUM_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(embedding_ptr + tl.load(tokens_ptr + row) * WIDTH + columns, mask=inside, other=0.0)
    for stream in tl.static_range(NUM):
        tl.store(streams_ptr + (row * NUM + stream) * WIDTH + columns, values, mask=inside)
    if tl.program_id(1) == 0:
        streams = tl.arange(0, NUM_BLOCK)
        tl.store(pre_ptr + row * NUM + streams, (streams == 0).to(tl.float32), mask=streams < NUM)


@dataclass(slots=True, frozen=True)
class OpenStreams:
    """`ops.OpenStreams`."""

    numerics: Numerics

    def __call__(self, embedding: Tensor, token_ids: Tensor, *, num_streams: int) -> tuple[Tensor, Tensor]:
        num_rows, width = len(token_ids), embedding.shape[1]
        streams = embedding.new_empty(num_rows, num_streams, width, dtype=self.numerics.dtype)
        pre = embedding.new_empty(num_rows, num_streams, dtype=torch.float32)
        if num_rows:
            block = min(_BLOCK, triton.next_power_of_2(width))
            _open_streams_kernel[(num_rows, triton.cdiv(width, block))](
                embedding,
                token_ids,
                streams,
                pre,
                NUM=num_streams,
                NUM_BLOCK=triton.next_power_of_2(num_streams),
                WIDTH=width,
                BLOCK=block,
            )
        return streams, pre


IMPLEMENTATIONS = (triton_kernel("open_streams", OpenStreams),)
