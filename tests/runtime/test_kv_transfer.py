"""Hand-over buffers: what goes in comes out, and what is wrong is refused with a reason."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from deepinfer.errors import RequestError
from deepinfer.models.model_spec import KVPart
from deepinfer.protocol import KVHandle
from deepinfer.runtime.kv_transfer import Buffer, check_handover, pack_parts, split_parts

DIGEST = "00112233aabbccdd"


def _packed() -> tuple[tuple[KVPart, ...], KVHandle, Buffer]:
    parts = (
        KVPart("global", 0, 3, torch.arange(12, dtype=torch.uint8)),
        KVPart("empty", 0, 0, torch.zeros(0, dtype=torch.uint8)),
        KVPart("window", 7, 2, torch.tensor([200, 201], dtype=torch.uint8)),
    )
    return parts, *pack_parts(parts, request_id="a", source_rank=3, num_tokens=9, layout_digest=DIGEST)


def test_parts_come_out_as_they_went_in() -> None:
    parts, handle, buffer = _packed()
    assert (handle.nbytes, handle.num_tokens, buffer.dtype) == (14, 9, np.uint8)
    check_handover(handle, buffer, layout_digest=DIGEST)
    for read_only in (False, True):
        buffer.flags.writeable = not read_only
        for part, again in zip(parts, split_parts(handle, buffer), strict=True):
            assert (again.group, again.first_position, again.num_records) == (
                part.group,
                part.first_position,
                part.num_records,
            )
            assert torch.equal(again.data, part.data)


@pytest.mark.parametrize("place", range(14))
def test_any_changed_byte_is_found(place: int) -> None:
    _, handle, buffer = _packed()
    buffer[place] ^= 128
    with pytest.raises(RequestError, match="'a' from prefill rank 3 is corrupt") as refused:
        check_handover(handle, buffer, layout_digest=DIGEST)
    assert refused.value.code == "kv_corrupt"


def test_a_buffer_of_another_size_is_refused() -> None:
    _, handle, buffer = _packed()
    with pytest.raises(RequestError, match="has 13 bytes, the handle says 14, its groups add up to 14"):
        check_handover(handle, buffer[:-1], layout_digest=DIGEST)
    with pytest.raises(RequestError, match="its groups add up to 12"):
        check_handover(msgspec.structs.replace(handle, groups=handle.groups[:1]), buffer, layout_digest=DIGEST)


def test_another_layout_is_refused() -> None:
    _, handle, buffer = _packed()
    with pytest.raises(RequestError, match=f"has the cache layout {DIGEST}, this rank has {'f' * 16}") as refused:
        check_handover(handle, buffer, layout_digest="f" * 16)
    assert refused.value.code == "kv_layout_mismatch"
