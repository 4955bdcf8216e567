"""Bytes on the wire: one encoder and one decoder for all messages, and packed columns.

Columns are little-endian and contiguous; unpacking is zero-copy and read-only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from deepinfer.protocol import Message

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return `message` as msgpack bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in `data`; raises `msgspec.ValidationError` with the field's path when it is none."""
    return _decoder.decode(data)


def pack(values: Sequence[int] | npt.NDArray[np.generic]) -> bytes:
    """Return integers as an int32 column; raises `OverflowError` when one does not fit."""
    array = np.asarray(values)
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise OverflowError(f"an int32 column can't hold {array.min()} .. {array.max()}")
    return array.astype("<i4").tobytes()


def unpack(column: bytes) -> npt.NDArray[np.int32]:
    """Return an int32 column as a read-only array [n]."""
    return np.frombuffer(column, dtype="<i4")


def pack_floats(values: Sequence[float] | npt.NDArray[np.generic]) -> bytes:
    """Return floats as a float32 column."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(column: bytes) -> npt.NDArray[np.float32]:
    """Return a float32 column as a read-only array [n]."""
    return np.frombuffer(column, dtype="<f4")


def pack_codes(values: Sequence[int] | npt.NDArray[np.generic]) -> bytes:
    """Return small non-negative integers (0..255) as a uint8 column."""
    return np.asarray(values, dtype=np.uint8).tobytes()


def unpack_codes(column: bytes) -> npt.NDArray[np.uint8]:
    """Return a uint8 column as a read-only array [n]."""
    return np.frombuffer(column, dtype=np.uint8)
