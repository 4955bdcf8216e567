"""KV groups: cache tensors that share their block size and their life."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True, frozen=True)
class KVGroup:
    """A named part of the cache.

    `kind` "paged": blocks of `tokens_per_block` token positions, as many as the sequence is long. "sequence": one
    block per sequence whatever its length (window rings, open pairs); its block id is the sequence's slot.
    `bytes_per_block` covers all layers of the group in the device's record format. `prefix_cacheable`: content
    depends on the token prefix alone. `wire_format` names the record layout of hand-overs, with its sizes.
    """

    name: str
    kind: Literal["paged", "sequence"]
    tokens_per_block: int
    bytes_per_block: int
    prefix_cacheable: bool
    wire_format: str

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens needs in this group."""
        if self.kind == "sequence":
            return 1
        return -(-num_tokens // self.tokens_per_block)


def layout_digest(groups: tuple[KVGroup, ...]) -> str:
    """Return 16 hex digits over what two ranks must share to exchange KV: names, kinds and wire formats."""
    text = "\n".join(f"{group.name} {group.kind} {group.wire_format}" for group in groups)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
