"""A prefill rank: runs prompts, answers with first tokens and references of the KV buffers."""

from __future__ import annotations

from typing import ClassVar

from deepinfer.actors.rank_actor import RankActor
from deepinfer.protocol import Role


class PrefillRank(RankActor):
    """Accepts `PrefillBatch`, answers `PrefillResult`."""

    role: ClassVar[Role] = "prefill"
