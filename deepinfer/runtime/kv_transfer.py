"""A sequence's KV as one contiguous buffer with a handle that says what is in it, and back."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.errors import RequestError
from deepinfer.models.model_spec import KVPart
from deepinfer.protocol import KVGroupExtent, KVHandle

Buffer = npt.NDArray[np.uint8]


def pack_parts(
    parts: tuple[KVPart, ...], *, request_id: str, source_rank: int, num_tokens: int, layout_digest: str
) -> tuple[KVHandle, Buffer]:
    """Return the parts behind each other in one uint8 buffer, and its handle."""
    extents = tuple(
        KVGroupExtent(
            group=part.group,
            first_position=part.first_position,
            num_records=part.num_records,
            nbytes=part.data.numel(),
        )
        for part in parts
    )
    buffer = np.concatenate([np.zeros(0, np.uint8), *(part.data.numpy() for part in parts)])
    handle = KVHandle(
        request_id=request_id,
        source_rank=source_rank,
        num_tokens=num_tokens,
        layout_digest=layout_digest,
        groups=extents,
        nbytes=buffer.nbytes,
        checksum=zlib.crc32(buffer.data),
    )
    return handle, buffer


def check_handover(handle: KVHandle, buffer: Buffer, *, layout_digest: str) -> None:
    """Raise RequestError when `buffer` is not what `handle` describes, or was written in another layout."""
    where = f"KV of request {handle.request_id!r} from prefill rank {handle.source_rank}"
    if handle.layout_digest != layout_digest:
        message = f"{where} has the cache layout {handle.layout_digest}, this rank has {layout_digest}"
        raise RequestError(message, code="kv_layout_mismatch")
    expected = sum(extent.nbytes for extent in handle.groups)
    if not buffer.nbytes == handle.nbytes == expected:
        message = f"{where} has {buffer.nbytes} bytes, the handle says {handle.nbytes}, its groups add up to {expected}"
        raise RequestError(message, code="kv_corrupt")
    checksum = zlib.crc32(buffer.data)
    if checksum != handle.checksum:
        message = f"{where} is corrupt: its checksum is {checksum:08x}, not {handle.checksum:08x}"
        raise RequestError(message, code="kv_corrupt")


def split_parts(handle: KVHandle, buffer: Buffer) -> tuple[KVPart, ...]:
    """Return the parts of a checked buffer. A read-only buffer is copied: torch has no read-only tensors."""
    data = torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())
    parts = []
    end = 0
    for extent in handle.groups:
        start, end = end, end + extent.nbytes
        parts.append(KVPart(extent.group, extent.first_position, extent.num_records, data[start:end]))
    return tuple(parts)
