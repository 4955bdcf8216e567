"""Ranks whose memory says that it belongs to another container: no other rank can open it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from deepinfer.platforms.memory_handle import MemoryHandle
from deepinfer.runtime.build import build_rank_engine
from deepinfer.runtime.rank_engine import RankEngine


def build(*arguments: Any, **options: Any) -> RankEngine:
    """`build_rank_engine`, and move the rank's memory out of reach."""
    engine = build_rank_engine(*arguments, **options)
    arena = engine._parts.arena
    if arena is not None:
        handle = msgspec.msgpack.decode(arena.handle, type=MemoryHandle)
        far = msgspec.msgpack.encode(msgspec.structs.replace(handle, namespace=1))
        arena._memory = replace(arena._memory, handle=far)
    return engine
