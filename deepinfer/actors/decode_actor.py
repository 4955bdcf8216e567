"""A decode rank: takes over prefilled sequences with their KV and generates until they end."""

from __future__ import annotations

from typing import ClassVar

from deepinfer.actors.rank_actor import RankActor
from deepinfer.protocol import Role


class DecodeRank(RankActor):
    """Accepts `DecodeBatch` with KV buffers, answers `DecodeResult`."""

    role: ClassVar[Role] = "decode"
