"""What a client needs to know of a running engine."""

from __future__ import annotations

import msgspec

from deepinfer.config import ClusterConfig
from deepinfer.protocol import RankReady


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A running engine; `is_shared`: it outlives its clients."""

    name: str
    config: ClusterConfig
    model_directory: str
    vocab_size: int
    max_model_len: int
    ranks: tuple[RankReady, ...]
    is_shared: bool = False
