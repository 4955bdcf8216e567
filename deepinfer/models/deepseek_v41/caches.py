"""Cache tensors of one rank: window rings, compressed pools and open pairs.

Groups: "global" (paged): main and index records of every KV source; "window" (one block a slot): a ring of
`window + 12` rows per layer, so that two steps of drafts can be undone; "open_pair" (one block a slot): value and gate
of the first token of pairs at ratio-2 sources, a ring of 8 pairs, 16 positions; "draft" (one block a slot, only where
drafts are in use): for each draft stage a ring like a layer's, of keys made from the target's features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import PagedRows, RecordFormat
from deepinfer.kernels.registry import KernelSet
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.models.deepseek_v41.config import ModelConfig

GLOBAL_GROUP, WINDOW_GROUP, OPEN_PAIR_GROUP, DRAFT_GROUP = "global", "window", "open_pair", "draft"
OPEN_PAIRS_PER_SLOT = 8
MAX_UNDONE_TOKENS = 2 * (1 + 5)  # two steps in flight, each one token and five drafts


@dataclass(slots=True, frozen=True)
class CacheLayout:
    """Record formats and sizes that follow from the configuration and the kernel set.

    `num_draft_stages` is 0 where drafts are not in use.
    """

    num_layers: int
    num_draft_stages: int
    ring_length: int
    ratios: dict[int, int]
    window_record: RecordFormat
    main_record: RecordFormat
    index_record: RecordFormat

    @property
    def pair_sources(self) -> tuple[int, ...]:
        """KV sources that merge two tokens into one entry."""
        return tuple(layer for layer, ratio in self.ratios.items() if ratio == 2)

    @property
    def pair_width(self) -> int:
        """float32 values of an open pair: the first token's value, then its gate."""
        return 2 * self.main_record.width


@dataclass(slots=True, frozen=True)
class Caches:
    """Tensors on the device; records are uint8. Rows that attention reads lie in one tensor if they are equally long.

    `window[l]` [slots * ring, bytes]; `main[s]`, `index[s]` [blocks * tokens_per_block / ratio, bytes] by KV source;
    `open_pairs[s]` float32 [slots * 8, 2 d] by ratio-2 source. `draft[s]` [slots * ring, bytes] by draft stage;
    `draft_starts` int64 [slots]: positions below it have no draft record. `step_rows` [n, bytes]: room for the window
    records of a step's own rows, in the tensor of the others; no rows where records differ in length.
    """

    layout: CacheLayout
    tokens_per_block: int
    window: tuple[Tensor, ...]
    main: dict[int, Tensor]
    index: dict[int, Tensor]
    open_pairs: dict[int, Tensor]
    draft: tuple[Tensor, ...]
    draft_starts: Tensor
    step_rows: Tensor

    def room_for_step(self, num_rows: int) -> Tensor | None:
        """Return room for the window records of a step's own rows, the same for every layer; None: it has too many."""
        return self.step_rows[:num_rows] if num_rows <= len(self.step_rows) else None

    def entries_per_block(self, source: int) -> int:
        """Compressed entries of `source` in one block of the global group."""
        return self.tokens_per_block // self.layout.ratios[source]

    def index_rows(self, source: int, block_table: Tensor) -> PagedRows:
        """The index keys of `source` for sequences with this block table [B, max_blocks]."""
        return PagedRows(self.index[source], self.layout.index_record, block_table, self.entries_per_block(source))


def cache_layout(config: ModelConfig, kernels: KernelSet, *, with_drafts: bool) -> CacheLayout:
    """Return the layout of `config` in the record formats of `kernels`, with draft rings or without."""
    return CacheLayout(
        num_layers=config.num_layers,
        num_draft_stages=config.num_draft_stages if with_drafts else 0,
        ring_length=config.sliding_window + MAX_UNDONE_TOKENS,
        ratios={source: config.compress_ratio(source) for source in config.kv_source_layer_ids},
        window_record=kernels.record_formats("window", config.head_dim),
        main_record=kernels.record_formats("main", config.head_dim),
        index_record=kernels.record_formats("index", config.index_head_dim),
    )


def cache_groups(layout: CacheLayout, *, tokens_per_block: int) -> tuple[KVGroup, ...]:
    """Return the groups in the order global, window, open pair, draft; `tokens_per_block` is even."""
    assert tokens_per_block % 2 == 0, f"tokens_per_block {tokens_per_block} must be even: entries cover up to 2 tokens"
    entry_bytes = layout.main_record.num_bytes + layout.index_record.num_bytes
    sources = ",".join(f"{source}/{ratio}" for source, ratio in layout.ratios.items())
    ring = layout.ring_length
    pairs = len(layout.pair_sources)

    def rings(name: str, count: int, parts: str) -> KVGroup:
        return KVGroup(
            name=name,
            kind="sequence",
            tokens_per_block=ring,
            bytes_per_block=count * ring * layout.window_record.num_bytes,
            prefix_cacheable=False,
            wire_format=f"{layout.window_record.name} {parts} {count} rows {ring}",
        )

    groups = (
        KVGroup(
            name=GLOBAL_GROUP,
            kind="paged",
            tokens_per_block=tokens_per_block,
            bytes_per_block=sum(tokens_per_block // ratio * entry_bytes for ratio in layout.ratios.values()),
            prefix_cacheable=True,
            wire_format=f"{layout.main_record.name} {layout.index_record.name} sources {sources}",
        ),
        rings(WINDOW_GROUP, layout.num_layers, "layers"),
        KVGroup(
            name=OPEN_PAIR_GROUP,
            kind="sequence",
            tokens_per_block=2 * OPEN_PAIRS_PER_SLOT,
            bytes_per_block=pairs * OPEN_PAIRS_PER_SLOT * layout.pair_width * 4,
            prefix_cacheable=False,
            wire_format=f"float32 {layout.pair_width} sources {','.join(map(str, layout.pair_sources))}",
        ),
    )
    return (*groups, rings(DRAFT_GROUP, layout.num_draft_stages, "stages")) if layout.num_draft_stages else groups


def allocate_caches(
    layout: CacheLayout,
    *,
    num_blocks: dict[str, int],
    num_slots: int,
    tokens_per_block: int,
    max_step_rows: int,
    device: torch.device,
) -> Caches:
    """Return zeroed caches; `num_blocks` needs the global group only."""

    def pools(num_rows: list[int], num_bytes: int) -> list[Tensor]:
        rows = torch.zeros(sum(num_rows), num_bytes, dtype=torch.uint8, device=device)
        return list(rows.split(num_rows))

    pool_rows = [num_blocks[GLOBAL_GROUP] * tokens_per_block // ratio for ratio in layout.ratios.values()]
    rings = [num_slots * layout.ring_length] * (layout.num_layers + layout.num_draft_stages)
    if layout.window_record.num_bytes == layout.main_record.num_bytes:
        *parts, step_rows = pools([*rings, *pool_rows, max_step_rows], layout.window_record.num_bytes)
    else:
        parts = [
            *(pools([count], layout.window_record.num_bytes)[0] for count in rings),
            *(pools([count], layout.main_record.num_bytes)[0] for count in pool_rows),
        ]
        step_rows = parts[0][:0]
    index = [pools([count], layout.index_record.num_bytes)[0] for count in pool_rows]
    return Caches(
        layout=layout,
        tokens_per_block=tokens_per_block,
        window=tuple(parts[: layout.num_layers]),
        main=dict(zip(layout.ratios, parts[len(rings) :], strict=True)),
        index=dict(zip(layout.ratios, index, strict=True)),
        open_pairs={
            source: torch.zeros(num_slots * OPEN_PAIRS_PER_SLOT, layout.pair_width, device=device)
            for source in layout.pair_sources
        },
        draft=tuple(parts[layout.num_layers : len(rings)]),
        draft_starts=torch.zeros(num_slots, dtype=torch.int64, device=device),
        step_rows=step_rows,
    )
