"""Cache rows in Triton: packing, unpacking, storing, and the compression of two tokens into one row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import triton_kernel
from deepinfer.kernels.nvidia.index_codes import index_record
from deepinfer.kernels.nvidia.number_formats import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0_ceiling,
    fp8_scale,
    group_maxima,
    spread,
)
from deepinfer.kernels.ops import Numerics, RecordFormat, RecordKind
from deepinfer.kernels.reference.cache import raw_format

_KINDS = {"window": 0, "main": 1, "index": 2}
_ROWS = 4


@triton.jit
def quantise_rows(values, KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes and scale bytes, both int32, of float32 values [ROWS, WIDTH]; kinds: window, main, index."""
    if KIND == 0:
        scale = fp8_scale(group_maxima(values, ROWS, WIDTH // 32, 32))
        codes = encode_e4m3(tl.div_rn(values, spread(decode_e8m0(scale), ROWS, WIDTH // 32, 32))).to(tl.int32)
    elif KIND == 1:
        largest = tl.maximum(group_maxima(values, ROWS, WIDTH // 16, 16), 0.01171875)  # 6 * 2^-9
        byte = encode_e4m3(tl.div_rn(largest, tl.full((ROWS, WIDTH // 16), 6.0, tl.float32)))
        codes = encode_e2m1(tl.div_rn(values, spread(decode_e4m3(byte), ROWS, WIDTH // 16, 16)))
        scale = byte.to(tl.int32)
    else:
        largest = tl.maximum(group_maxima(values, ROWS, WIDTH // 32, 32), 7.052966104933725e-38)  # 6 * 2^-126
        scale = encode_e8m0_ceiling(largest * (1.0 / 6.0))
        codes = encode_e2m1(tl.div_rn(values, spread(decode_e8m0(scale), ROWS, WIDTH // 32, 32)))
    return codes, scale


@triton.jit
def load_record_bytes(pool_ptr, offsets, inside, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Code bytes and scale bytes (uint8) of packed records at byte `offsets` (int64); zeros where not `inside`."""
    GROUP: tl.constexpr = 16 if KIND == 1 else 32
    CODE_BYTES: tl.constexpr = WIDTH if KIND == 0 else WIDTH // 2
    place = pool_ptr + offsets[:, None]
    codes = tl.load(place + tl.arange(0, CODE_BYTES)[None, :], mask=inside[:, None], other=0)
    groups = tl.arange(0, WIDTH // GROUP)[None, :]
    return codes, tl.load(place + CODE_BYTES + groups, mask=inside[:, None], other=0)


@triton.jit
def decode_record(codes, scale, KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Values [ROWS, WIDTH] float32 of what `load_record_bytes` returned."""
    GROUP: tl.constexpr = 16 if KIND == 1 else 32
    if KIND == 1:
        factors = decode_e4m3(scale)
    else:
        factors = decode_e8m0(scale.to(tl.int32))
    if KIND == 0:
        values = decode_e4m3(codes)
    else:
        pairs = codes.to(tl.int32)
        values = tl.reshape(tl.join(decode_e2m1(pairs & 15), decode_e2m1(pairs >> 4)), (ROWS, WIDTH))
    return values * spread(factors, ROWS, WIDTH // GROUP, GROUP)


@triton.jit
def _pack_kernel(x_ptr, out_ptr, num_rows, KIND: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < num_rows)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    values = tl.load(x_ptr + rows[:, None] * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    codes, scale = quantise_rows(values, KIND, ROWS, WIDTH)
    GROUP: tl.constexpr = 16 if KIND == 1 else 32
    CODE_BYTES: tl.constexpr = WIDTH if KIND == 0 else WIDTH // 2
    place = out_ptr + rows[:, None] * (CODE_BYTES + WIDTH // GROUP)
    if KIND == 0:
        tl.store(place + columns, codes.to(tl.uint8), mask=inside)
    else:
        low, high = tl.split(tl.reshape(codes, (ROWS, WIDTH // 2, 2)))
        tl.store(place + tl.arange(0, WIDTH // 2)[None, :], (low | (high << 4)).to(tl.uint8), mask=inside)
    tl.store(place + CODE_BYTES + tl.arange(0, WIDTH // GROUP)[None, :], scale.to(tl.uint8), mask=inside)


@triton.jit
def _unpack_kernel(
    pool_ptr,
    out_ptr,
    num_rows,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    codes, scale = load_record_bytes(pool_ptr, rows * NUM_BYTES, inside, KIND, WIDTH)
    values = decode_record(codes, scale, KIND, ROWS, WIDTH)
    columns = tl.arange(0, WIDTH)[None, :]
    tl.store(out_ptr + rows[:, None] * WIDTH + columns, values, mask=inside[:, None])


@triton.jit
def _store_kernel(pool_ptr, rows_ptr, records_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    source = tl.program_id(0).to(tl.int64)
    target = tl.load(rows_ptr + source)
    if target >= 0:
        columns = tl.arange(0, BLOCK)
        record = tl.load(records_ptr + source * WIDTH + columns, mask=columns < WIDTH, other=0)
        tl.store(pool_ptr + target * WIDTH + columns, record, mask=columns < WIDTH)


@triton.jit
def _pair_kernel(rows_ptr, stored_ptr, first_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    columns = tl.arange(0, WIDTH)[None, :]
    stored = tl.load(first_ptr + rows, mask=inside, other=-1)
    far = (stored >= 0)[:, None] & inside[:, None]
    near = ((stored < 0) & (rows > 0) & inside)[:, None]
    old = stored_ptr + stored[:, None] * (2 * WIDTH) + columns
    own = rows_ptr + rows[:, None] * (2 * WIDTH) + columns
    before = own - 2 * WIDTH
    inside = inside[:, None]
    gate_one = tl.load(old + WIDTH, mask=far, other=0.0) + tl.load(before + WIDTH, mask=near, other=0.0)
    gate_two = tl.load(own + WIDTH, mask=inside, other=0.0)
    largest = tl.maximum(gate_one, gate_two)
    first, second = tl.exp(gate_one - largest), tl.exp(gate_two - largest)
    total = first + second
    value = tl.load(old, mask=far, other=0.0) + tl.load(before, mask=near, other=0.0)
    mixed = value * tl.div_rn(first, total)
    mixed += tl.load(own, mask=inside, other=0.0) * tl.div_rn(second, total)
    tl.store(out_ptr + rows[:, None] * WIDTH + columns, mixed, mask=inside)


@triton.jit
def _locate_kernel(
    entries_ptr,
    sequence_ptr,
    table_ptr,
    out_ptr,
    table_stride,
    NUM: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < NUM
    entries = tl.load(entries_ptr + row * NUM + columns, mask=inside, other=-1)
    known = entries >= 0
    table = table_ptr + tl.load(sequence_ptr + row) * table_stride
    block = tl.load(table + entries // PER_BLOCK, mask=known, other=0)
    rows = tl.where(known, block * PER_BLOCK + entries % PER_BLOCK, -1)
    tl.store(out_ptr + row * NUM + columns, rows.to(tl.int32), mask=inside)


def pack_rows(values: Tensor, *, out: Tensor | None = None, kind: RecordKind) -> Tensor:
    """Packed records uint8 [..., bytes], in `out` if given, of values [..., width], width a power of two."""
    width = values.shape[-1]
    num_bytes = width + width // 32 if kind == "window" else width // 2 + width // (16 if kind == "main" else 32)
    if out is None:
        out = torch.empty(*values.shape[:-1], num_bytes, dtype=torch.uint8, device=values.device)
    num_rows = values.numel() // width
    if num_rows:
        grid = (triton.cdiv(num_rows, _ROWS),)
        _pack_kernel[grid](values.contiguous(), out, num_rows, KIND=_KINDS[kind], WIDTH=width, ROWS=_ROWS)
    return out


def unpack_rows(records: Tensor, *, kind: RecordKind, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_rows`; `dtype` float32 or bf16, both exact."""
    out = torch.empty(*records.shape[:-1], width, dtype=dtype, device=records.device)
    num_rows = out.numel() // width
    if num_rows:
        grid = (triton.cdiv(num_rows, _ROWS),)
        _unpack_kernel[grid](
            records.contiguous(),
            out,
            num_rows,
            KIND=_KINDS[kind],
            WIDTH=width,
            NUM_BYTES=records.shape[-1],
            ROWS=_ROWS,
        )
    return out


@dataclass(slots=True, frozen=True)
class RecordFormats:
    """`ops.RecordFormats`: the bytes of the reference, packed and unpacked by one kernel each; index keys as FP8."""

    numerics: Numerics

    def __call__(self, kind: RecordKind, width: int) -> RecordFormat:
        if not self.numerics.quantise_caches:
            return raw_format(kind, width, self.numerics.dtype)
        if kind == "index":
            return index_record(width)
        num_bytes = width + width // 32 if kind == "window" else width // 2 + width // 16
        return RecordFormat(
            f"{kind}:packed{num_bytes}",
            width,
            num_bytes,
            partial(pack_rows, kind=kind),
            partial(unpack_rows, kind=kind, width=width),
        )


@dataclass(slots=True, frozen=True)
class StoreRows:
    """`ops.StoreRows`; records are moved in words of four bytes if they divide into such."""

    def __call__(self, pool: Tensor, rows: Tensor, records: Tensor) -> None:
        if len(rows):
            word = torch.uint8 if pool.shape[1] % 4 else torch.int32
            pool, records = pool.view(word), records.contiguous().view(word)
            width = pool.shape[1]
            block = triton.next_power_of_2(width)
            _store_kernel[(len(rows),)](pool, rows, records, WIDTH=width, BLOCK=block, num_warps=1)


@dataclass(slots=True, frozen=True)
class PairCompress:
    """`ops.PairCompress`."""

    numerics: Numerics

    def __call__(self, rows: Tensor, stored: Tensor, first_rows: Tensor) -> Tensor:
        num_rows, width = rows.shape[0], rows.shape[1] // 2
        out = torch.empty(num_rows, width, dtype=self.numerics.dtype, device=rows.device)
        if num_rows:
            grid = (triton.cdiv(num_rows, _ROWS),)
            _pair_kernel[grid](rows.contiguous(), stored, first_rows, out, num_rows, WIDTH=width, ROWS=_ROWS)
        return out


@dataclass(slots=True, frozen=True)
class LocateEntries:
    """`ops.LocateEntries`."""

    def __call__(self, entries: Tensor, row_sequence: Tensor, block_table: Tensor, *, entries_per_block: int) -> Tensor:
        num_rows, num_entries = entries.shape
        out = torch.empty(num_rows, num_entries, dtype=torch.int32, device=entries.device)
        if num_rows:
            block = min(512, triton.next_power_of_2(num_entries))
            _locate_kernel[(num_rows, triton.cdiv(num_entries, block))](
                entries.contiguous(),
                row_sequence,
                block_table,
                out,
                block_table.stride(0),
                NUM=num_entries,
                PER_BLOCK=entries_per_block,
                BLOCK=block,
            )
        return out


IMPLEMENTATIONS = (
    triton_kernel("record_formats", RecordFormats),
    triton_kernel("store_rows", lambda _: StoreRows()),
    triton_kernel("pair_compress", PairCompress),
    triton_kernel("locate_entries", lambda _: LocateEntries()),
)
