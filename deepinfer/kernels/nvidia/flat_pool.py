"""Cache rows as bf16 values in one flat pool, which Hopper's attention reads where they lie.

A value is first rounded as the packed record would round it, and each such value is exact in bf16: a row takes 1,024
instead of 288 or 528 bytes and attention sees the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.cache import RecordFormats as PackedFormats
from deepinfer.kernels.nvidia.cache import quantise_rows
from deepinfer.kernels.nvidia.number_formats import decode_e2m1, decode_e4m3, decode_e8m0, spread
from deepinfer.kernels.ops import Numerics, RecordFormat, RecordKind

_ROWS = 4
_PLACES = 128  # attention takes numbers of rows in multiples of this


@triton.jit
def _round_kernel(x_ptr, out_ptr, num_rows, KIND: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < num_rows)[:, None]
    place = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    codes, scale = quantise_rows(tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32), KIND, ROWS, WIDTH)
    if KIND == 0:
        values = decode_e4m3(codes.to(tl.uint8)) * spread(decode_e8m0(scale), ROWS, WIDTH // 32, 32)
    else:
        values = decode_e2m1(codes) * spread(decode_e4m3(scale.to(tl.uint8)), ROWS, WIDTH // 16, 16)
    tl.store(out_ptr + place, values, mask=inside)


@triton.jit
def _numbers_kernel(
    window_ptr,
    main_ptr,
    out_ptr,
    length_ptr,
    ring_length,
    ring_first,
    step_first,
    main_first,
    NUM_WINDOW: tl.constexpr,
    NUM_MAIN: tl.constexpr,
    WINDOW_BLOCKS: tl.constexpr,
    MAIN_BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """One row, 128 places at a time: window rows in the first blocks of places, main rows behind."""
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * ((WINDOW_BLOCKS + MAIN_BLOCKS) * PLACES)
    length = 0
    for block in tl.static_range(WINDOW_BLOCKS + MAIN_BLOCKS):
        places = block * PLACES + tl.arange(0, PLACES)
        if block < WINDOW_BLOCKS:
            rows = tl.load(window_ptr + row * NUM_WINDOW + places, mask=places < NUM_WINDOW, other=-1).to(tl.int64)
            rows = tl.where(rows < 0, -1, rows + tl.where(rows < ring_length, ring_first, step_first - ring_length))
        else:
            columns = places - WINDOW_BLOCKS * PLACES
            rows = tl.load(main_ptr + row * NUM_MAIN + columns, mask=columns < NUM_MAIN, other=-1).to(tl.int64)
            rows = tl.where(rows < 0, -1, rows + main_first)
        tl.store(out_ptr + places, rows.to(tl.int32))
        length = tl.maximum(length, tl.max(tl.where(rows < 0, 0, places + 1), 0))
    tl.store(length_ptr + row, length)


def round_rows(values: Tensor, *, out: Tensor | None = None, kind: RecordKind) -> Tensor:
    """Records uint8 [..., 2 * width], in `out` if given: values [..., width] rounded, as bf16."""
    width = values.shape[-1]
    if out is None:
        out = torch.empty(*values.shape[:-1], 2 * width, dtype=torch.uint8, device=values.device)
    num_rows = values.numel() // width
    if num_rows:
        _round_kernel[(triton.cdiv(num_rows, _ROWS),)](
            values.contiguous(), out.view(torch.bfloat16), num_rows, KIND=int(kind == "main"), WIDTH=width, ROWS=_ROWS
        )
    return out


def _values(records: Tensor) -> Tensor:
    return records.contiguous().view(torch.bfloat16).float()


@dataclass(slots=True, frozen=True)
class RecordFormats:
    """`ops.RecordFormats`: window and main rows as bf16 of the rounded values, index keys packed."""

    numerics: Numerics

    def __call__(self, kind: RecordKind, width: int) -> RecordFormat:
        if kind == "index" or not self.numerics.quantise_caches:
            return PackedFormats(self.numerics)(kind, width)
        return RecordFormat(f"{kind}:rounded{2 * width}", width, 2 * width, partial(round_rows, kind=kind), _values)


@dataclass(slots=True, frozen=True)
class FlatPool:
    """bf16 `rows` [n, 1, width] that hold ring, step records and main records, and the first row of each."""

    rows: Tensor
    ring_first: int
    step_first: int
    main_first: int


def flat_pool(ring: Tensor, step_records: Tensor, main: Tensor | None) -> FlatPool | None:
    """Return the pool that all of these rows lie in; None when they are not rows of bf16 values in one storage."""
    parts = [part for part in (ring, step_records, main) if part is not None]
    storage, num_bytes = ring.untyped_storage(), ring.shape[1]
    same_pool = all(part.untyped_storage().data_ptr() == storage.data_ptr() for part in parts)
    if not same_pool or any(part.shape[1] != num_bytes or part.storage_offset() % num_bytes for part in parts):
        return None
    first = [part.storage_offset() // num_bytes for part in parts]
    width = num_bytes // 2
    rows = ring.view(torch.bfloat16).as_strided((storage.nbytes() // num_bytes, 1, width), (width, width, 1), 0)
    return FlatPool(rows, first[0], first[1], first[-1])


@dataclass(slots=True, frozen=True)
class RowNumbers:
    """Keys of T rows. `numbers` int32 [T, 1, places]: pool rows of the window's keys, then of the main ones; -1: none.

    `lengths` int32 [T]: the places up to the last key; None: not known. Both parts are padded to multiples of 128.
    """

    numbers: Tensor
    lengths: Tensor | None

    def piece(self, rows: slice) -> RowNumbers:
        """Those of some of the rows."""
        return RowNumbers(self.numbers[rows], None if self.lengths is None else self.lengths[rows])


def row_numbers(pool: FlatPool, window_rows: Tensor, main_rows: Tensor | None, *, ring_length: int) -> RowNumbers:
    """Return where the keys lie; arguments as in `ops.SparseAttention`."""
    num_rows, num_window = window_rows.shape
    num_main = 0 if main_rows is None else main_rows.shape[1]
    window_blocks, main_blocks = triton.cdiv(num_window, _PLACES), triton.cdiv(num_main, _PLACES)
    num_places = (window_blocks + main_blocks) * _PLACES
    numbers = torch.empty(num_rows, 1, num_places, dtype=torch.int32, device=window_rows.device)
    lengths = torch.empty(num_rows, dtype=torch.int32, device=window_rows.device)
    if num_rows:
        _numbers_kernel[(num_rows,)](
            window_rows.contiguous(),
            window_rows if main_rows is None else main_rows.contiguous(),
            numbers,
            lengths,
            ring_length,
            pool.ring_first,
            pool.step_first,
            pool.main_first,
            NUM_WINDOW=num_window,
            NUM_MAIN=num_main,
            WINDOW_BLOCKS=window_blocks,
            MAIN_BLOCKS=main_blocks,
            PLACES=_PLACES,
            num_warps=1,
        )
    return RowNumbers(numbers, lengths)
