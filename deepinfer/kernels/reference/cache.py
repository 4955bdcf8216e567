"""Cache rows: record formats, storing, and the compression of two tokens into one row.

Packed records: window = E4M3 codes, then one E8M0 byte per 32 channels (528 bytes at 512 channels); main = e2m1 codes
two a byte, then one E4M3 byte per 16 channels (288 bytes at 512); index = e2m1 codes, then one E8M0 byte per 32
channels (68 bytes at 128). Without cache quantisation a record is the raw values in the model dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import Numerics, RecordFormat, RecordKind
from deepinfer.kernels.reference import quantize
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.norm import RMSNorm, Rotate

_Codes = tuple[Tensor, Tensor]


@dataclass(slots=True, frozen=True)
class RecordFormats:
    """`ops.RecordFormats`."""

    numerics: Numerics

    def __call__(self, kind: RecordKind, width: int) -> RecordFormat:
        if not self.numerics.quantise_caches:
            return raw_format(kind, width, self.numerics.dtype)
        if kind == "window":
            return _packed_format(kind, width, width, quantize.quantize_fp8, quantize.dequantize_fp8)
        if kind == "main":
            return _packed_format(kind, width, width // 2, quantize.quantize_fp4_main, quantize.dequantize_fp4_main)
        return _packed_format(kind, width, width // 2, quantize.quantize_fp4_index, quantize.dequantize_fp4)


def _packed_format(
    kind: RecordKind,
    width: int,
    code_bytes: int,
    encode: Callable[[Tensor], _Codes],
    decode: Callable[[Tensor, Tensor], Tensor],
) -> RecordFormat:
    num_bytes = code_bytes + width // (quantize.MAIN_BLOCK if kind == "main" else quantize.BLOCK)

    def pack(values: Tensor, *, out: Tensor | None = None) -> Tensor:
        codes, scale = encode(values)
        return torch.cat((codes.view(torch.uint8), scale), -1, out=out)

    def unpack(records: Tensor) -> Tensor:
        codes = records[..., :code_bytes]
        return decode(codes.view(torch.float8_e4m3fn) if kind == "window" else codes, records[..., code_bytes:])

    return RecordFormat(f"{kind}:packed{num_bytes}", width, num_bytes, pack, unpack)


def raw_format(kind: RecordKind, width: int, dtype: torch.dtype) -> RecordFormat:
    num_bytes = width * dtype.itemsize

    def pack(values: Tensor, *, out: Tensor | None = None) -> Tensor:
        records = values.to(dtype).contiguous().view(torch.uint8)
        return records if out is None else out.copy_(records)

    def unpack(records: Tensor) -> Tensor:
        return records.contiguous().view(dtype).float()

    return RecordFormat(f"{kind}:raw{num_bytes}", width, num_bytes, pack, unpack)


@dataclass(slots=True, frozen=True)
class StoreRows:
    """`ops.StoreRows`."""

    def __call__(self, pool: Tensor, rows: Tensor, records: Tensor) -> None:
        kept = (rows >= 0).nonzero().squeeze(1)
        pool.index_copy_(0, rows[kept], records[kept])


@dataclass(slots=True, frozen=True)
class PairCompress:
    """`ops.PairCompress`."""

    numerics: Numerics

    def __call__(self, rows: Tensor, stored: Tensor, first_rows: Tensor) -> Tensor:
        here = (first_rows < 0).unsqueeze(1)
        first_value, first_gate = torch.where(here, rows.roll(1, 0), stored[first_rows.clamp_min(0)]).chunk(2, 1)
        value, gate = rows.chunk(2, 1)
        largest = torch.maximum(first_gate, gate)
        first, second = torch.exp(first_gate - largest), torch.exp(gate - largest)
        total = first + second
        return (first_value * (first / total) + value * (second / total)).to(self.numerics.dtype)


@dataclass(slots=True, frozen=True)
class LatentRecords:
    """`ops.LatentRecords`."""

    numerics: Numerics

    def __call__(
        self,
        latent: Tensor,
        weight: Tensor,
        cosine: Tensor,
        sine: Tensor,
        *,
        epsilon: float,
        record: RecordFormat,
        out: Tensor | None = None,
    ) -> Tensor:
        normed = RMSNorm(self.numerics)(latent, weight, epsilon=epsilon)
        return record.pack(Rotate(self.numerics)(normed, cosine, sine), out=out)


@dataclass(slots=True, frozen=True)
class LocateEntries:
    """`ops.LocateEntries`."""

    def __call__(self, entries: Tensor, row_sequence: Tensor, block_table: Tensor, *, entries_per_block: int) -> Tensor:
        known = entries.clamp_min(0)
        blocks = block_table[row_sequence.unsqueeze(1), known // entries_per_block]
        return torch.where(entries < 0, -1, blocks * entries_per_block + known % entries_per_block).to(torch.int32)


IMPLEMENTATIONS = (
    implementation("record_formats", RecordFormats),
    implementation("store_rows", lambda _: StoreRows()),
    implementation("pair_compress", PairCompress),
    implementation("latent_records", LatentRecords),
    implementation("locate_entries", lambda _: LocateEntries()),
)
