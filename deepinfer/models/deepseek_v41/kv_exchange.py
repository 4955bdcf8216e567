"""Hand-over of a sequence's cache between ranks: everything that later positions read, in one part per group.

Part "global": for each KV source its main records, then its index records, ascending by entry. Part "window": for each
layer its last `ring` positions, ascending. Part "open_pair": for each ratio-2 source the first token of an open pair,
when the number of tokens is odd. Part "draft": like "window" for each draft stage; a rank also drafts from fewer
positions, or none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.caches import (
    DRAFT_GROUP,
    GLOBAL_GROUP,
    OPEN_PAIR_GROUP,
    OPEN_PAIRS_PER_SLOT,
    WINDOW_GROUP,
    Caches,
)
from deepinfer.models.model_spec import KVPart
from deepinfer.platforms.transfer import to_device, to_host

_Place = tuple[Tensor, Tensor]  # a cache tensor seen as bytes [rows, bytes], and the rows that belong to the part


def export_kv(caches: Caches, *, slot: int, block_ids: dict[str, Tensor], num_tokens: int) -> tuple[KVPart, ...]:
    """Return copies in host memory, there once the stream has come so far.

    `block_ids["global"]` covers `num_tokens`, other groups go by the slot.
    """
    parts = []
    for group, (first, count) in _extents(caches, num_tokens).items():
        places = _places(caches, group, slot=slot, block_ids=block_ids, first=first, count=count)
        pieces = [pool[rows].flatten() for pool, rows in places]
        data = to_host(torch.cat(pieces)) if pieces else torch.zeros(0, dtype=torch.uint8)
        parts.append(KVPart(group, first_position=first, num_records=count, data=data))
    return tuple(parts)


def import_kv(
    caches: Caches, *, slot: int, block_ids: dict[str, Tensor], num_tokens: int, parts: tuple[KVPart, ...]
) -> None:
    """Write what `export_kv` returned for the same number of tokens and the same layout.

    The part "draft" may begin later than exported: `draft_starts` of the slot tells.
    """
    extents = _extents(caches, num_tokens)
    assert {part.group for part in parts} == set(extents), f"parts {[part.group for part in parts]}"
    for part in parts:
        first, count = extents[part.group]
        if part.group == DRAFT_GROUP:
            assert first <= part.first_position, f"draft rows from {part.first_position}, not from {first} on"
            first, count = part.first_position, num_tokens - part.first_position
            caches.draft_starts[slot : slot + 1].fill_(first)
        assert (part.first_position, part.num_records) == (first, count), f"{part.group}: not of {num_tokens} tokens"
        data, offset = to_device(part.data, caches.window[0].device), 0
        for pool, rows in _places(caches, part.group, slot=slot, block_ids=block_ids, first=first, count=count):
            size = len(rows) * pool.shape[1]
            pool[rows] = data[offset : offset + size].view(len(rows), pool.shape[1])
            offset += size
        assert offset == part.data.numel(), f"{part.group}: {part.data.numel()} bytes for {offset}"


def _extents(caches: Caches, num_tokens: int) -> dict[str, tuple[int, int]]:
    """Return group -> (first position, number of positions)."""
    window = min(num_tokens, caches.layout.ring_length)
    extents = {
        GLOBAL_GROUP: (0, num_tokens),
        WINDOW_GROUP: (num_tokens - window, window),
        OPEN_PAIR_GROUP: (num_tokens - num_tokens % 2, num_tokens % 2),
    }
    return extents | {DRAFT_GROUP: extents[WINDOW_GROUP]} if caches.draft else extents


def _places(
    caches: Caches, group: str, *, slot: int, block_ids: dict[str, Tensor], first: int, count: int
) -> Iterator[_Place]:
    device = caches.window[0].device
    if group == GLOBAL_GROUP:
        blocks = block_ids[GLOBAL_GROUP].to(device)
        for source, ratio in caches.layout.ratios.items():
            per_block = caches.entries_per_block(source)
            entries = torch.arange(count // ratio, device=device)
            rows = blocks[entries // per_block] * per_block + entries % per_block
            yield caches.main[source], rows
            yield caches.index[source], rows
    elif group in (WINDOW_GROUP, DRAFT_GROUP):
        ring = caches.layout.ring_length
        rows = slot * ring + torch.arange(first, first + count, device=device) % ring
        for pool in caches.window if group == WINDOW_GROUP else caches.draft:
            yield pool, rows
    else:
        positions = torch.arange(first, first + count, device=device)
        rows = slot * OPEN_PAIRS_PER_SLOT + positions // 2 % OPEN_PAIRS_PER_SLOT
        for pool in caches.open_pairs.values():
            yield pool.view(torch.uint8), rows
