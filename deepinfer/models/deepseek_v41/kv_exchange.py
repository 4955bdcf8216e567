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


def kv_bytes(caches: Caches, num_tokens: int) -> int:
    """Return how many bytes all parts of so many tokens have together."""
    return sum(_part_bytes(caches, group, count) for group, (_, count) in _extents(caches, num_tokens).items())


def export_kv(
    caches: Caches, *, slot: int, block_ids: dict[str, Tensor], num_tokens: int, into: Tensor | None = None
) -> tuple[KVPart, ...]:
    """Return copies, there once the stream has come so far: in `into`, one behind the other, or in host memory.

    `into` uint8, of the caches' device, has `kv_bytes` bytes or more. `block_ids["global"]` covers `num_tokens`, other
    groups go by the slot.
    """
    device = caches.window[0].device
    data = torch.empty(kv_bytes(caches, num_tokens), dtype=torch.uint8, device=device) if into is None else into
    end = 0
    for group, (first, count) in _extents(caches, num_tokens).items():
        for pool, rows in _places(caches, group, slot=slot, block_ids=block_ids, first=first, count=count):
            start, end = end, end + len(rows) * pool.shape[1]
            torch.index_select(pool, 0, rows, out=data[start:end].view(len(rows), pool.shape[1]))
    return _parts(caches, num_tokens, to_host(data) if into is None else data)


def _parts(caches: Caches, num_tokens: int, data: Tensor) -> tuple[KVPart, ...]:
    parts, end = [], 0
    for group, (first, count) in _extents(caches, num_tokens).items():
        start, end = end, end + _part_bytes(caches, group, count)
        parts.append(KVPart(group, first_position=first, num_records=count, data=data[start:end]))
    return tuple(parts)


def import_kv(
    caches: Caches, *, slot: int, block_ids: dict[str, Tensor], num_tokens: int, parts: tuple[KVPart, ...]
) -> None:
    """Write what `export_kv` returned for the same number of tokens and the same layout, from host or device.

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
        device, offset = caches.window[0].device, 0
        data = part.data if part.data.device == device else to_device(part.data, device)
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


def _pools(caches: Caches, group: str) -> list[tuple[Tensor, int]]:
    """Return the cache tensors of a group, seen as bytes [rows, bytes], and how many positions share a row of each."""
    if group == GLOBAL_GROUP:
        sources = caches.layout.ratios.items()
        return [(pool, ratio) for source, ratio in sources for pool in (caches.main[source], caches.index[source])]
    if group == OPEN_PAIR_GROUP:
        return [(pool.view(torch.uint8), 1) for pool in caches.open_pairs.values()]
    return [(pool, 1) for pool in (caches.window if group == WINDOW_GROUP else caches.draft)]


def _part_bytes(caches: Caches, group: str, count: int) -> int:
    return sum(count // ratio * pool.shape[1] for pool, ratio in _pools(caches, group))


def _places(
    caches: Caches, group: str, *, slot: int, block_ids: dict[str, Tensor], first: int, count: int
) -> Iterator[_Place]:
    device, rows_by_ratio = caches.window[0].device, {}
    for pool, ratio in _pools(caches, group):
        if ratio not in rows_by_ratio:
            positions = torch.arange(first, first + count // ratio, device=device)
            rows_by_ratio[ratio] = _rows(caches, group, positions, ratio, slot=slot, block_ids=block_ids)
        yield pool, rows_by_ratio[ratio]


def _rows(
    caches: Caches, group: str, positions: Tensor, ratio: int, *, slot: int, block_ids: dict[str, Tensor]
) -> Tensor:
    """Return the rows of `positions`, which for the global group are entries of `ratio` positions each."""
    if group == GLOBAL_GROUP:
        per_block = caches.tokens_per_block // ratio
        return block_ids[GLOBAL_GROUP].to(positions.device)[positions // per_block] * per_block + positions % per_block
    if group == OPEN_PAIR_GROUP:
        return slot * OPEN_PAIRS_PER_SLOT + positions // 2 % OPEN_PAIRS_PER_SLOT
    return slot * caches.layout.ring_length + positions % caches.layout.ring_length
