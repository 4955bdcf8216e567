"""A sequence's KV as one contiguous buffer with a handle that says what is in it, and back."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.errors import RequestError
from deepinfer.models.model_spec import KVPart
from deepinfer.platforms.transfer import to_host
from deepinfer.protocol import KVGroupExtent, KVHandle, KVPlace
from deepinfer.runtime.piece_arena import ALIGNMENT, LentPiece, Piece

Buffer = npt.NDArray[np.uint8]
HeldKV = (
    Buffer | torch.Tensor | LentPiece
)  # a hand-over at its decode rank: in host memory, or in a piece of its device
_WORDS = ALIGNMENT // 8


def pack_parts(
    parts: tuple[KVPart, ...], *, request_id: str, source_rank: int, num_tokens: int, layout_digest: str
) -> tuple[KVHandle, Buffer]:
    """Return the parts, which lie in host memory, behind each other in one uint8 buffer, and its handle."""
    buffer = np.concatenate([np.zeros(0, np.uint8), *(part.data.numpy() for part in parts)])
    handle = KVHandle(
        request_id=request_id,
        source_rank=source_rank,
        num_tokens=num_tokens,
        layout_digest=layout_digest,
        groups=_extents(parts),
        nbytes=buffer.nbytes,
        checksum=zlib.crc32(buffer.data),
    )
    return handle, buffer


def describe_piece(
    parts: tuple[KVPart, ...],
    *,
    request_id: str,
    source_rank: int,
    num_tokens: int,
    layout_digest: str,
    memory: bytes,
    piece: Piece,
    sums: Sequence[int],
) -> KVHandle:
    """Return the handle of parts that lie one behind the other in `piece` of the memory that `memory` opens."""
    first, second = sums
    groups = _extents(parts)
    return KVHandle(
        request_id=request_id,
        source_rank=source_rank,
        num_tokens=num_tokens,
        layout_digest=layout_digest,
        groups=groups,
        nbytes=sum(extent.nbytes for extent in groups),
        checksum=0,
        place=KVPlace(memory=memory, offset=piece.offset, ticket=piece.ticket, sums=(first, second)),
    )


def seal_piece(data: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Zero what lies behind the first `num_bytes` of a piece, and return its sums as they come to the host."""
    data[num_bytes:].zero_()
    return to_host(piece_sums(data))


def piece_sums(data: torch.Tensor) -> torch.Tensor:
    """Return int64 [2], the same on every device: over rows of 32 words, and over the 32 columns, with odd weights.

    `data` uint8, a multiple of 256 bytes. Sums wrap around, so no order of adding changes them. A word that differs
    changes both: an odd multiple of something that is not 0 is not 0.
    """
    words = data.view(torch.int64).view(-1, _WORDS)
    return torch.stack([_weighted(words.sum(dim=1)), _weighted(words.sum(dim=0))])


def check_handover(handle: KVHandle, buffer: Buffer, *, layout_digest: str) -> None:
    """Raise RequestError when `buffer` is not what `handle` describes, or was written in another layout."""
    check_shape(handle, buffer.nbytes, layout_digest=layout_digest)
    checksum = zlib.crc32(buffer.data)
    if checksum != handle.checksum:
        message = f"{_where(handle)} is corrupt: its checksum is {checksum:08x}, not {handle.checksum:08x}"
        raise RequestError(message, code="kv_corrupt")


def check_shape(handle: KVHandle, num_bytes: int, *, layout_digest: str) -> None:
    """Raise RequestError unless `handle` describes `num_bytes` bytes in this layout."""
    if handle.layout_digest != layout_digest:
        message = f"{_where(handle)} has the cache layout {handle.layout_digest}, this rank has {layout_digest}"
        raise RequestError(message, code="kv_layout_mismatch")
    expected = sum(extent.nbytes for extent in handle.groups)
    if not num_bytes == handle.nbytes == expected:
        message = f"{_where(handle)} has {num_bytes} bytes, the handle says {handle.nbytes}"
        raise RequestError(f"{message}, its groups add up to {expected}", code="kv_corrupt")


def check_sums(handle: KVHandle, sums: Sequence[int]) -> None:
    """Raise RequestError unless the handle's place has these sums."""
    assert handle.place is not None, handle.request_id
    if tuple(sums) != handle.place.sums:
        message = f"{_where(handle)} is corrupt: its sums are {tuple(sums)}, not {handle.place.sums}"
        raise RequestError(message, code="kv_corrupt")


def split_parts(handle: KVHandle, buffer: HeldKV) -> tuple[KVPart, ...]:
    """Return the parts of a checked buffer. A read-only one is copied: torch has no read-only tensors."""
    if isinstance(buffer, np.ndarray):
        data = torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())
    else:
        data = buffer if isinstance(buffer, torch.Tensor) else buffer.data
    parts = []
    end = 0
    for extent in handle.groups:
        start, end = end, end + extent.nbytes
        parts.append(KVPart(extent.group, extent.first_position, extent.num_records, data[start:end]))
    return tuple(parts)


def _extents(parts: tuple[KVPart, ...]) -> tuple[KVGroupExtent, ...]:
    return tuple(
        KVGroupExtent(
            group=part.group,
            first_position=part.first_position,
            num_records=part.num_records,
            nbytes=part.data.numel(),
        )
        for part in parts
    )


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    return (sums * torch.arange(1, 2 * len(sums) + 1, 2, device=sums.device)).sum()


def _where(handle: KVHandle) -> str:
    return f"KV of request {handle.request_id!r} from prefill rank {handle.source_rank}"
