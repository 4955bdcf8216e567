"""Sparse attention in Triton over packed or bf16 records: one program per row and block of heads, running maximum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, triton_kernel
from deepinfer.kernels.nvidia.cache import decode_record, load_record_bytes
from deepinfer.kernels.ops import RecordFormat

RAW = 3
_KINDS = {
    "window:packed": 0,
    "main:packed": 1,
    "window:raw": RAW,
    "main:raw": RAW,
    "window:rounded": RAW,
    "main:rounded": RAW,
}


@triton.jit
def load_keys(
    pool_ptr, rows, inside, KIND: tl.constexpr, NUM_BYTES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr
):
    """Keys [KEYS, WIDTH] bf16 of one pool; zeros where not `inside`."""
    if KIND == 3:
        place = pool_ptr.to(tl.pointer_type(tl.bfloat16)) + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        return tl.load(place, mask=inside[:, None], other=0.0)
    else:
        codes, scale = load_record_bytes(pool_ptr, rows * NUM_BYTES, inside, KIND, WIDTH)
        return decode_record(codes, scale, KIND, KEYS, WIDTH).to(tl.bfloat16)


@triton.jit
def load_window(
    ring_ptr,
    step_ptr,
    rows,
    ring_length,
    KIND: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys of rows that lie in the ring or, beyond its length, among this step's own."""
    old, own = (rows >= 0) & (rows < ring_length), rows >= ring_length
    if KIND == 3:
        keys = load_keys(ring_ptr, rows, old, KIND, NUM_BYTES, KEYS, WIDTH)
        return keys + load_keys(step_ptr, rows - ring_length, own, KIND, NUM_BYTES, KEYS, WIDTH)
    else:
        codes, scale = load_record_bytes(ring_ptr, rows * NUM_BYTES, old, KIND, WIDTH)
        own_codes, own_scale = load_record_bytes(step_ptr, (rows - ring_length) * NUM_BYTES, own, KIND, WIDTH)
        return decode_record(codes | own_codes, scale | own_scale, KIND, KEYS, WIDTH).to(tl.bfloat16)


@triton.jit
def _attend(query, keys, present, maximum, total, mixed, scale):
    """Take a block of keys into the running sums."""
    scores = tl.dot(query, tl.trans(keys)) * scale
    scores = tl.where(present[None, :], scores, float("-inf"))
    raised = tl.maximum(maximum, tl.max(scores, 1))
    probabilities, decay = tl.exp(scores - raised[:, None]), tl.exp(maximum - raised)
    total = total * decay + tl.sum(probabilities, 1)
    mixed = tl.dot(probabilities.to(tl.bfloat16), keys, mixed * decay[:, None])
    return raised, total, mixed


@triton.jit
def _attention_kernel(
    query_ptr,
    ring_ptr,
    step_ptr,
    window_rows_ptr,
    main_ptr,
    main_rows_ptr,
    sink_ptr,
    out_ptr,
    ring_length,
    scale,
    NUM_WINDOW: tl.constexpr,
    NUM_MAIN: tl.constexpr,
    WINDOW_KIND: tl.constexpr,
    MAIN_KIND: tl.constexpr,
    WINDOW_BYTES: tl.constexpr,
    MAIN_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    place = (row * HEADS + heads)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    query = tl.load(query_ptr + place, mask=(heads < HEADS)[:, None], other=0.0)
    maximum = tl.full((HEAD_BLOCK,), -1e30, tl.float32)
    total = tl.zeros((HEAD_BLOCK,), tl.float32)
    mixed = tl.zeros((HEAD_BLOCK, WIDTH), tl.float32)
    for start in range(0, NUM_WINDOW, KEYS):
        columns = start + tl.arange(0, KEYS)
        rows = tl.load(window_rows_ptr + row * NUM_WINDOW + columns, mask=columns < NUM_WINDOW, other=-1).to(tl.int64)
        if tl.max(rows, 0) >= 0:
            keys = load_window(ring_ptr, step_ptr, rows, ring_length, WINDOW_KIND, WINDOW_BYTES, KEYS, WIDTH)
            maximum, total, mixed = _attend(query, keys, rows >= 0, maximum, total, mixed, scale)
    for start in range(0, NUM_MAIN, KEYS):
        columns = start + tl.arange(0, KEYS)
        rows = tl.load(main_rows_ptr + row * NUM_MAIN + columns, mask=columns < NUM_MAIN, other=-1).to(tl.int64)
        if tl.max(rows, 0) >= 0:
            keys = load_keys(main_ptr, rows, rows >= 0, MAIN_KIND, MAIN_BYTES, KEYS, WIDTH)
            maximum, total, mixed = _attend(query, keys, rows >= 0, maximum, total, mixed, scale)
    sink = tl.load(sink_ptr + heads, mask=heads < HEADS, other=0.0)
    total += tl.exp(sink - maximum)
    tl.store(out_ptr + place, mixed / total[:, None], mask=(heads < HEADS)[:, None])


@dataclass(slots=True, frozen=True)
class SparseAttention:
    """`ops.SparseAttention`; head_dim a power of two."""

    def locate(self, **_keys: object) -> None:
        """Nothing: it looks for keys and reads them at once."""

    def __call__(
        self,
        query: Tensor,
        *,
        ring: Tensor,
        step_records: Tensor,
        window_rows: Tensor,
        window_record: RecordFormat,
        main: Tensor | None,
        main_rows: Tensor | None,
        main_record: RecordFormat | None,
        sink: Tensor,
        scale: float,
        located: None = None,  # noqa: ARG002
    ) -> Tensor:
        out = torch.empty_like(query)
        num_rows, num_heads, width = query.shape
        if not num_rows:
            return out
        head_block = min(64, max(16, triton.next_power_of_2(num_heads)))
        _attention_kernel[(num_rows, triton.cdiv(num_heads, head_block))](
            query.contiguous(),
            ring,
            step_records,
            window_rows.contiguous(),
            ring if main is None else main,
            window_rows if main_rows is None else main_rows.contiguous(),
            sink,
            out,
            len(ring),
            scale,
            NUM_WINDOW=window_rows.shape[1],
            NUM_MAIN=0 if main_rows is None else main_rows.shape[1],
            WINDOW_KIND=record_kind(window_record),
            MAIN_KIND=RAW if main_record is None else record_kind(main_record),
            WINDOW_BYTES=window_record.num_bytes,
            MAIN_BYTES=0 if main_record is None else main_record.num_bytes,
            HEADS=num_heads,
            WIDTH=width,
            HEAD_BLOCK=head_block,
            KEYS=64,
            num_warps=8 if width * head_block > 8192 else 4,
            num_stages=1,
        )
        return out


def record_kind(record: RecordFormat) -> int:
    """The compile-time kind of a record format; its name without the size tells."""
    return _KINDS[record.name.rstrip("0123456789")]


IMPLEMENTATIONS = (triton_kernel("sparse_attention", lambda _: SparseAttention(), dtypes=BF16),)
