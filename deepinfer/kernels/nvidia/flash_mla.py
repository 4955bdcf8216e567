"""Sparse attention of FlashMLA (package sgl-flash-mla) on Hopper: 64 or 128 heads of 512.

Its Hopper kernel reads bf16 rows of one pool. Where ring, step records and main records are such rows of one storage
(`flat_pool`), only their numbers are written. Else the named records of each row are unpacked side by side into a
buffer first: caches may stay packed, 288 instead of 1024 bytes an entry, for one more pass over the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import flash_mla
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.nvidia.abilities import BF16, VERIFIED
from deepinfer.kernels.nvidia.attention import RAW, load_keys, load_window, record_kind
from deepinfer.kernels.nvidia.attention import SparseAttention as TritonAttention
from deepinfer.kernels.nvidia.flat_pool import FlatPool, RecordFormats, RowNumbers, flat_pool, row_numbers
from deepinfer.kernels.ops import RecordFormat
from deepinfer.kernels.registry import Implementation

PACKAGE = "sgl-flash-mla"
_WIDTH, _HEADS, _KEY_MULTIPLE = 512, (64, 128), 128
_MAX_ROWS = 16384  # of a call: what the kernel counts in 32 bits stays far below their end
_BUFFER_BYTES = 1 << 30  # rows go through in pieces whose unpacked keys stay below this


def probe() -> None:
    """Run one small call; raises what the package raises."""
    query = torch.ones(1, 64, _WIDTH, dtype=torch.bfloat16, device="cuda")
    keys = torch.ones(1, 1, _WIDTH, dtype=torch.bfloat16, device="cuda")
    numbers = torch.full((1, 1, _KEY_MULTIPLE), -1, dtype=torch.int32, device="cuda")
    numbers[..., 0] = 0
    result = _attend(query, keys, RowNumbers(numbers, None), torch.full((64,), -torch.inf, device="cuda"), 1.0)
    if not bool((result == 1).all()):
        raise RuntimeError(f"attention over ones gave {float(result[0, 0, 0])} instead of 1")


def _attend(query: Tensor, keys: Tensor, wanted: RowNumbers, sink: Tensor, scale: float) -> Tensor:
    if not len(query):
        return query
    out: Tensor = flash_mla.flash_mla_sparse_fwd(
        query,
        keys,
        wanted.numbers,
        scale,
        d_v=_WIDTH,
        attn_sink=sink,
        topk_length=wanted.lengths,
        use_legacy=True,
    )[0]
    return out


@triton.jit
def _gather_kernel(
    ring_ptr,
    step_ptr,
    window_rows_ptr,
    main_ptr,
    main_rows_ptr,
    keys_ptr,
    numbers_ptr,
    ring_length,
    NUM_WINDOW: tl.constexpr,
    NUM_MAIN: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    WINDOW_KIND: tl.constexpr,
    MAIN_KIND: tl.constexpr,
    WINDOW_BYTES: tl.constexpr,
    MAIN_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Unpack KEYS keys of one row: window rows in the first blocks of places, main rows behind."""
    row = tl.program_id(0).to(tl.int64)
    WINDOW_BLOCKS: tl.constexpr = (NUM_WINDOW + KEYS - 1) // KEYS
    places = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    is_window = tl.program_id(1) < WINDOW_BLOCKS
    columns = tl.where(is_window, places, places - WINDOW_BLOCKS * KEYS)
    if is_window:
        rows = tl.load(window_rows_ptr + row * NUM_WINDOW + columns, mask=columns < NUM_WINDOW, other=-1).to(tl.int64)
        keys = load_window(ring_ptr, step_ptr, rows, ring_length, WINDOW_KIND, WINDOW_BYTES, KEYS, WIDTH)
    else:
        rows = tl.load(main_rows_ptr + row * NUM_MAIN + columns, mask=columns < NUM_MAIN, other=-1).to(tl.int64)
        keys = load_keys(main_ptr, rows, rows >= 0, MAIN_KIND, MAIN_BYTES, KEYS, WIDTH)
    own = row * NUM_PLACES + places
    tl.store(numbers_ptr + own, tl.where(rows >= 0, own, -1).to(tl.int32))
    target = keys_ptr + own[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(target, keys, mask=(rows >= 0)[:, None])


@dataclass(slots=True, frozen=True)
class Located:
    """A pool, and where the keys of T rows lie in it."""

    pool: FlatPool
    numbers: RowNumbers


@dataclass(slots=True, frozen=True)
class SparseAttention:
    """`ops.SparseAttention`; other heads than 64 or 128 of 512 go to Triton."""

    def locate(
        self,
        *,
        ring: Tensor,
        step_records: Tensor,
        window_rows: Tensor,
        window_record: RecordFormat,
        main: Tensor | None,
        main_rows: Tensor | None,
    ) -> Located | None:
        """The rows of keys that lie in one pool, or None."""
        pool = flat_pool(ring, step_records, main) if record_kind(window_record) == RAW else None
        if pool is None or window_record.width != _WIDTH:
            return None
        return Located(pool, row_numbers(pool, window_rows, main_rows, ring_length=len(ring)))

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
        located: Located | None = None,
    ) -> Tensor:
        if query.shape[1] not in _HEADS or query.shape[2] != _WIDTH:
            return TritonAttention()(
                query,
                ring=ring,
                step_records=step_records,
                window_rows=window_rows,
                window_record=window_record,
                main=main,
                main_rows=main_rows,
                main_record=main_record,
                sink=sink,
                scale=scale,
            )
        if located is None:
            located = self.locate(
                ring=ring,
                step_records=step_records,
                window_rows=window_rows,
                window_record=window_record,
                main=main,
                main_rows=main_rows,
            )
        if located is not None:
            return _attend_in_place(query, located, sink, scale)
        if main is None or main_rows is None or main_record is None:
            main, main_rows, main_record = ring, window_rows[:, :0], window_record
        num_places = _padded(window_rows.shape[1]) + _padded(main_rows.shape[1])
        piece = max(1, _BUFFER_BYTES // (2 * _WIDTH * num_places))
        parts = []
        for start in range(0, max(1, len(query)), piece):
            rows = slice(start, start + piece)
            keys, numbers = _gather(
                ring, step_records, window_rows[rows], window_record, main, main_rows[rows], main_record
            )
            parts.append(_attend(query[rows], keys, RowNumbers(numbers, None), sink, scale))
        return _join(parts)


def _attend_in_place(query: Tensor, located: Located, sink: Tensor, scale: float) -> Tensor:
    parts = []
    for start in range(0, max(1, len(query)), _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        parts.append(_attend(query[rows], located.pool.rows, located.numbers.piece(rows), sink, scale))
    return _join(parts)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padded(num_keys: int) -> int:
    return triton.cdiv(num_keys, _KEY_MULTIPLE) * _KEY_MULTIPLE


def _gather(
    ring: Tensor,
    step_records: Tensor,
    window_rows: Tensor,
    window_record: RecordFormat,
    main: Tensor,
    main_rows: Tensor,
    main_record: RecordFormat,
) -> tuple[Tensor, Tensor]:
    """Keys bf16 [T * places, 1, 512] and their numbers int32 [T, 1, places], -1 = no key."""
    num_rows, num_window = window_rows.shape
    num_places = _padded(num_window) + _padded(main_rows.shape[1])
    keys = torch.empty(num_rows * num_places, 1, _WIDTH, dtype=torch.bfloat16, device=ring.device)
    numbers = torch.empty(num_rows, 1, num_places, dtype=torch.int32, device=ring.device)
    if num_rows:
        keys_at_once = 16
        _gather_kernel[(num_rows, num_places // keys_at_once)](
            ring,
            step_records,
            window_rows.contiguous(),
            main,
            main_rows.contiguous(),
            keys,
            numbers,
            len(ring),
            NUM_WINDOW=num_window,
            NUM_MAIN=main_rows.shape[1],
            NUM_PLACES=num_places,
            WINDOW_KIND=record_kind(window_record),
            MAIN_KIND=record_kind(main_record),
            WINDOW_BYTES=window_record.num_bytes,
            MAIN_BYTES=main_record.num_bytes,
            WIDTH=_WIDTH,
            KEYS=keys_at_once,
            num_warps=2,
        )
    return keys, numbers


IMPLEMENTATIONS = (
    Implementation(
        op="sparse_attention",
        build=lambda _: SparseAttention(),
        device_types=("cuda",),
        dtypes=BF16,
        batch_invariant=True,
        package=PACKAGE,
        verified_chips=VERIFIED,
        required_chips=("sm_90",),
    ),
    Implementation(
        op="record_formats",
        build=RecordFormats,
        device_types=("cuda",),
        dtypes=BF16,
        batch_invariant=True,
        verified_chips=VERIFIED,
        required_chips=("sm_90",),
    ),
)
