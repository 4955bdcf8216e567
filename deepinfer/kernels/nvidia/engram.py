"""N-gram memory in Triton: hashed rows, gather with dequantisation, and the gate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.nvidia.host_memory import HostMemory, device_readable
from deepinfer.kernels.nvidia.number_formats import decode_e4m3, decode_e8m0
from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.reference.engram import EngramLookup as HostLookup

_GATE_BLOCK = 1024
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_DEVICE_BLOCK = 8, 4  # rows of a program, warps
_HOST_BLOCK, _HOST_PROGRAMS = (128, 16), 16


@triton.jit
def _rows_kernel(
    history_ptr,
    multipliers_ptr,
    primes_ptr,
    offsets_ptr,
    out_ptr,
    num_rows,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    heads = tl.arange(0, HEADS_BLOCK)
    inside = (rows < num_rows)[:, None] & (heads < HEADS)[None, :]
    mixed = tl.load(history_ptr + rows * LENGTH, mask=rows < num_rows, other=0) * tl.load(multipliers_ptr)
    for order in tl.static_range(LENGTH - 1):
        token = tl.load(history_ptr + rows * LENGTH + order + 1, mask=rows < num_rows, other=0)
        mixed = mixed ^ (token * tl.load(multipliers_ptr + order + 1))
        prime = tl.load(primes_ptr + order * HEADS + heads, mask=heads < HEADS, other=1)[None, :]
        offset = tl.load(offsets_ptr + order * HEADS + heads, mask=heads < HEADS, other=0)[None, :]
        rest = mixed[:, None] % prime
        rest = tl.where(rest < 0, rest + prime, rest)  # the remainder of a negative number has the divisor's sign
        place = out_ptr + (rows[:, None] * (LENGTH - 1) + order) * HEADS + heads[None, :]
        tl.store(place, rest + offset, mask=inside)


@triton.jit
def _lookup_kernel(
    rows_ptr,
    places_ptr,
    table_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Row i goes to place i, with `places_ptr` to the place that it names. `table_ptr`: of words of WORD bytes."""
    words, byte = tl.arange(0, WIDTH // WORD)[None, :], tl.arange(0, WORD)[None, None, :]
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        entries = first + tl.arange(0, ROWS).to(tl.int64)
        inside = entries < num_rows
        rows = tl.load(rows_ptr + entries, mask=inside, other=0)[:, None]
        places = entries if places_ptr is None else tl.load(places_ptr + entries, mask=inside, other=0)
        inside = inside[:, None]
        word = tl.load(table_ptr + rows * (WIDTH // WORD) + words, mask=inside, other=0)
        scale = tl.load(scale_ptr + rows * (WIDTH // 32) + words // (32 // WORD), mask=inside, other=0).to(tl.int32)
        codes = ((word[:, :, None] >> (byte * 8)) & 0xFF).to(tl.uint8)
        values = decode_e4m3(codes) * decode_e8m0(scale)[:, :, None]
        columns = words[:, :, None] * WORD + byte
        tl.store(out_ptr + places[:, None, None] * WIDTH + columns, values, mask=inside[:, :, None])


@triton.jit
def _gate_kernel(
    streams_ptr,
    memory_ptr,
    query_weight_ptr,
    key_weight_ptr,
    out_ptr,
    epsilon,
    root,
    NUM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one stream of one row; sums first, then the addition."""
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr = streams_ptr + (row * NUM + stream) * WIDTH
    key_ptr = memory_ptr + (row * (NUM + 1) + stream) * WIDTH
    dots = tl.zeros((BLOCK,), tl.float32)
    x_squares = tl.zeros((BLOCK,), tl.float32)
    key_squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(query_weight_ptr + stream * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        weight *= tl.load(key_weight_ptr + stream * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        dots += x * weight * key
        x_squares += x * x
        key_squares += key * key
    dot = tl.sum(dots, 0) * tl.rsqrt(tl.sum(x_squares, 0) / WIDTH + epsilon)
    dot = dot * tl.rsqrt(tl.sum(key_squares, 0) / WIDTH + epsilon) * root
    size = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    negative = (dot.to(tl.int32, bitcast=True) >> 31) != 0
    gate = 1.0 / (1.0 + tl.exp(tl.where(negative, size, -size)))
    value_ptr = memory_ptr + (row * (NUM + 1) + NUM) * WIDTH
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + (row * NUM + stream) * WIDTH + columns, x + gate * value, mask=inside)


@dataclass(slots=True, frozen=True)
class EngramRows:
    """`ops.EngramRows`; products wrap at 64 bits."""

    def __call__(self, history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
        num_rows, length = history.shape
        heads = primes.shape[1]
        out = torch.empty(num_rows, (length - 1) * heads, dtype=torch.int64, device=history.device)
        if num_rows:
            _rows_kernel[(triton.cdiv(num_rows, 32),)](
                history.contiguous(),
                multipliers,
                primes,
                offsets,
                out,
                num_rows,
                LENGTH=length,
                HEADS=heads,
                HEADS_BLOCK=triton.next_power_of_2(heads),
                ROWS=32,
            )
        return out


def gather_rows(rows: Tensor, table: Tensor, scale: Tensor, *, dtype: torch.dtype, in_table_order: bool) -> Tensor:
    """See `ops.EngramLookup`; the device reads `table` and `scale`. `in_table_order`: it reads them from front to back.

    For tables in host memory: each row lies on a page of its own, and the device translates addresses of neighbouring
    pages several times faster than those of pages far from each other. So few programs read at a time.
    """
    width = table.shape[1]
    out = torch.empty(rows.shape[0], rows.shape[1] * width, dtype=dtype, device=rows.device)
    numbers, places = rows.flatten().sort() if in_table_order else (rows.flatten(), None)
    block, num_warps = _HOST_BLOCK if in_table_order else _DEVICE_BLOCK
    num_programs = triton.cdiv(rows.numel(), block)
    if in_table_order:
        num_programs = min(num_programs, _HOST_PROGRAMS)
    words = _words(table)
    if rows.numel():
        _lookup_kernel[(num_programs,)](
            numbers,
            places,
            words,
            scale,
            out,
            rows.numel(),
            WIDTH=width,
            WORD=words.itemsize,
            ROWS=block,
            num_warps=num_warps,
        )
    return out


def _words(table: Tensor) -> Tensor:
    """Return `table` as the largest integers that its address allows: in a mapped file it begins anywhere."""
    itemsize = math.gcd(table.data_ptr(), _WORDS[0].itemsize)
    return table.view(next(dtype for dtype in _WORDS if dtype.itemsize == itemsize))


@dataclass(slots=True, frozen=True)
class EngramLookup:
    """`ops.EngramLookup`; the device reads a table in host memory where it lies.

    Where it can't, the host does, which waits for `rows`.
    """

    numerics: Numerics
    _readable: dict[int, HostMemory | None] = field(default_factory=dict)

    def capturable(self, table: Tensor, scale: Tensor, *, device: torch.device) -> bool:
        """See `ops.EngramLookup`."""
        return table.device == device or (self._near(table) is not None and self._near(scale) is not None)

    def __call__(self, rows: Tensor, table: Tensor, scale: Tensor) -> Tensor:
        if table.device == rows.device:
            return gather_rows(rows, table, scale, dtype=self.numerics.dtype, in_table_order=False)
        near_table, near_scale = self._near(table), self._near(scale)
        if near_table is None or near_scale is None:
            found = HostLookup(self.numerics)(rows.to(table.device), table, scale)
            return found.to(rows.device)
        return gather_rows(rows, near_table, near_scale, dtype=self.numerics.dtype, in_table_order=True)

    def _near(self, tensor: Tensor) -> Tensor | None:
        place = tensor.data_ptr()
        if place not in self._readable:
            self._readable[place] = device_readable(tensor)
        memory = self._readable[place]
        return None if memory is None else memory.tensor


@dataclass(slots=True, frozen=True)
class EngramGate:
    """`ops.EngramGate`."""

    numerics: Numerics

    def __call__(
        self, streams: Tensor, memory: Tensor, query_weight: Tensor, key_weight: Tensor, *, epsilon: float
    ) -> Tensor:
        num_rows, num, hidden = streams.shape
        out = torch.empty(streams.shape, dtype=self.numerics.dtype, device=streams.device)
        if num_rows:
            _gate_kernel[(num_rows, num)](
                streams.contiguous(),
                memory.contiguous(),
                query_weight,
                key_weight,
                out,
                epsilon,
                hidden**-0.5,
                NUM=num,
                WIDTH=hidden,
                BLOCK=min(_GATE_BLOCK, triton.next_power_of_2(hidden)),
            )
        return out


IMPLEMENTATIONS = (
    triton_kernel("engram_rows", lambda _: EngramRows()),
    triton_kernel("engram_lookup", EngramLookup),
    triton_kernel("engram_gate", EngramGate),
)
