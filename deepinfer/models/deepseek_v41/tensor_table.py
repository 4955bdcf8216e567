"""Every tensor of a checkpoint: name, dtype, shape and the part of the model it belongs to, from a `ModelConfig`.

Names, dtypes and shapes are the released checkpoint's: 96,085 tensors, of which 93,418 are the text model, 2,401 the
draft stages and 266 the image side, which is known by name only and skipped.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from deepinfer.models.deepseek_v41.config import QUANT_BLOCK, ModelConfig

_IMAGE_PREFIXES: Final = ("vision.", "aligner.")
_IMAGE_NAMES: Final = frozenset({"image_start", "image_end", "image_newline"})
# What fills the draft rings from the target's features; a rank that never drafts needs no more of the stages.
_RING_TENSORS: Final = (
    "main_proj.weight",
    "main_proj.scale",
    "main_norm.weight",
    "attn.wkv.weight",
    "attn.wkv.scale",
    "attn.kv_norm.weight",
)
_ITEM_BYTES: Final = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class Part(enum.StrEnum):
    """Parts of the model that memory is counted by."""

    EMBEDDING = "embedding and head"
    NORM = "norms and sinks"
    ATTENTION = "attention"
    COMPRESSOR = "compressors"
    INDEXER = "indexers"
    HYPER_CONNECTION = "hyper-connections"
    ROUTER = "routers"
    SHARED_EXPERT = "shared experts"
    ROUTED_EXPERT = "routed experts"
    ENGRAM_PROJECTION = "engram projections"
    ENGRAM_TABLE = "engram tables"
    DRAFT = "draft stages"


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor as it must be in the files. `dtype` is the safetensors name, `expert` the logical expert or None.

    `layer` is the backbone layer, None outside of the layers and in draft stages; `stage` is the draft stage. Tensors
    with `is_read` False are checked but never used.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None = None
    stage: int | None = None
    expert: int | None = None
    is_read: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes on disk and, since formats are kept, in memory."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class DraftShare(msgspec.Struct, frozen=True):
    """What a rank needs of the draft stages: all but other ranks' experts, or what fills the rings (`expert_ids` None).

    `expert_ids` are the logical experts that it holds of each stage.
    """

    expert_ids: tuple[int, ...] | None = None


def is_image_tensor(name: str) -> bool:
    """Whether a tensor belongs to the image side of the checkpoint, which is skipped."""
    return name.startswith(_IMAGE_PREFIXES) or name in _IMAGE_NAMES


def tensor_table(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return every tensor that a checkpoint of this config must have, draft stages included, by name."""
    table: dict[str, TensorSpec] = {}
    for spec in _all_tensors(config):
        assert spec.name not in table, spec.name
        table[spec.name] = spec
    return table


def rank_tensors(
    table: Iterable[TensorSpec], expert_ids: tuple[tuple[int, ...], ...], draft: DraftShare | None = None
) -> Iterator[TensorSpec]:
    """Yield what a rank reads that holds the logical experts `expert_ids[layer]` of each backbone layer.

    `draft` is its share of the draft stages, None for nothing of them. A logical expert that stands twice in a layer
    is yielded twice. Engram tables are yielded whole.
    """
    held = [Counter(ids) for ids in expert_ids]
    for spec in table:
        if not spec.is_read:
            continue
        if spec.stage is not None:
            yield from [spec] * _num_draft_copies(spec, draft)
        elif spec.layer is None or spec.expert is None:
            yield spec
        else:
            yield from [spec] * held[spec.layer][spec.expert]


def _num_draft_copies(spec: TensorSpec, draft: DraftShare | None) -> int:
    if draft is None:
        return 0
    if draft.expert_ids is None:
        return int(spec.name.split(".", 2)[2] in _RING_TENSORS)
    return 1 if spec.expert is None else draft.expert_ids.count(spec.expert)


def _all_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield TensorSpec("embed.weight", "BF16", (vocab, hidden), Part.EMBEDDING)
    yield TensorSpec("head.weight", "BF16", (vocab, hidden), Part.EMBEDDING)
    yield TensorSpec("norm.weight", "BF16", (hidden,), Part.NORM)
    for layer in range(config.num_layers):
        specs = [
            *_block(config, num_experts=config.n_routed_experts),
            *_compressor(config, layer),
            *_indexer(config, layer),
            *_engram(config, layer),
        ]
        for spec in specs:
            yield msgspec.structs.replace(spec, name=f"layers.{layer}.{spec.name}", layer=layer)
    for stage in range(config.num_draft_stages):
        for spec in [*_block(config, num_experts=config.dspark_n_routed_experts), *_draft_ends(config, stage)]:
            yield msgspec.structs.replace(spec, name=f"mtp.{stage}.{spec.name}", part=Part.DRAFT, stage=stage)


def _block(config: ModelConfig, *, num_experts: int) -> Iterator[TensorSpec]:
    """What every backbone layer and every draft stage has."""
    hidden, mixed = config.hidden_size, config.hc_mult * (2 + config.hc_mult)
    for name in ("attn", "ffn"):
        yield TensorSpec(f"{name}_norm.weight", "BF16", (hidden,), Part.NORM)
        yield TensorSpec(f"hc_{name}_fn", "F32", (mixed, config.hc_mult * hidden), Part.HYPER_CONNECTION)
        yield TensorSpec(f"hc_{name}_base", "F32", (mixed,), Part.HYPER_CONNECTION)
        yield TensorSpec(f"hc_{name}_scale", "F32", (3,), Part.HYPER_CONNECTION)
    yield from _attention(config)
    yield from _experts(config, num_experts)


def _attention(config: ModelConfig) -> Iterator[TensorSpec]:
    heads, groups, rank = config.num_attention_heads, config.o_groups, config.o_lora_rank
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    yield from _fp8("attn.wq_a", config.q_lora_rank, hidden, Part.ATTENTION)
    yield TensorSpec("attn.q_norm.weight", "BF16", (config.q_lora_rank,), Part.NORM)
    yield from _fp8("attn.wq_b", width, config.q_lora_rank, Part.ATTENTION)
    yield from _fp8("attn.wkv", config.head_dim, hidden, Part.ATTENTION)
    yield TensorSpec("attn.kv_norm.weight", "BF16", (config.head_dim,), Part.NORM)
    yield from _fp8("attn.wo_a", groups * rank, width // groups, Part.ATTENTION)
    yield from _fp8("attn.wo_b", hidden, groups * rank, Part.ATTENTION)
    yield TensorSpec("attn.attn_sink", "F32", (heads,), Part.NORM)


def _experts(config: ModelConfig, num_experts: int) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    yield TensorSpec("ffn.gate.weight", "BF16", (num_experts, hidden), Part.ROUTER)
    yield TensorSpec("ffn.gate.bias", "F32", (num_experts,), Part.ROUTER)
    yield TensorSpec("ffn.gate.bias_vl", "F32", (num_experts,), Part.ROUTER, is_read=False)  # image tokens only
    for name, (rows, columns) in shapes.items():
        yield from _fp8(f"ffn.shared_experts.{name}", rows, columns, Part.SHARED_EXPERT)
    for expert in range(num_experts):
        for name, (rows, columns) in shapes.items():
            stem, part = f"ffn.experts.{expert}.{name}", Part.ROUTED_EXPERT
            yield TensorSpec(f"{stem}.weight", "I8", (rows, columns // 2), part, expert=expert)
            yield TensorSpec(f"{stem}.scale", "F8_E8M0", (rows, columns // QUANT_BLOCK), part, expert=expert)


def _compressor(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    if not config.is_kv_source(layer):
        return
    shape = (config.head_dim, config.hidden_size)
    yield TensorSpec("attn.compressor.wkv.weight", "BF16", shape, Part.COMPRESSOR)
    if config.compress_ratio(layer) > 1:
        yield TensorSpec("attn.compressor.wgate.weight", "BF16", shape, Part.COMPRESSOR)
    yield TensorSpec("attn.compressor.norm.weight", "BF16", shape[:1], Part.COMPRESSOR)


def _indexer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    heads, width = config.index_n_heads, config.index_head_dim
    if config.is_index_source(layer):
        yield from _fp8("attn.indexer.wq_b", heads * width, config.q_lora_rank, Part.INDEXER)
        yield TensorSpec("attn.indexer.weights_proj.weight", "BF16", (heads, config.hidden_size), Part.INDEXER)
    if config.is_kv_source(layer):
        yield TensorSpec("attn.indexer.wk.weight", "BF16", (width, config.head_dim), Part.INDEXER)
        yield TensorSpec("attn.indexer.k_norm.weight", "BF16", (width,), Part.INDEXER)


def _engram(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    if layer not in config.engram_layer_ids:
        return
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    width, hidden = config.engram_head_dim, config.hidden_size
    yield TensorSpec("engram.embed.weight", "F8_E4M3", (rows, width), Part.ENGRAM_TABLE)
    yield TensorSpec("engram.embed.scale", "F8_E8M0", (rows, width // QUANT_BLOCK), Part.ENGRAM_TABLE)
    columns = config.num_engram_rows_per_token * width
    yield from _fp8("engram.wkv", (config.hc_mult + 1) * hidden, columns, Part.ENGRAM_PROJECTION)
    yield TensorSpec("engram.q_weight", "BF16", (config.hc_mult, hidden), Part.ENGRAM_PROJECTION)
    yield TensorSpec("engram.k_weight", "BF16", (config.hc_mult, hidden), Part.ENGRAM_PROJECTION)


def _draft_ends(config: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    """What only the first draft stage (target features) and only the last one (heads) have."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank
    if stage == 0:
        yield from _fp8("main_proj", hidden, len(config.dspark_target_layer_ids) * hidden, Part.DRAFT)
        yield TensorSpec("main_norm.weight", "BF16", (hidden,), Part.DRAFT)
    if stage == config.num_draft_stages - 1:
        yield TensorSpec("norm.weight", "BF16", (hidden,), Part.DRAFT)
        yield TensorSpec("markov_head.embed.weight", "BF16", (vocab, rank), Part.DRAFT)
        yield TensorSpec("markov_head.head.weight", "BF16", (vocab, rank), Part.DRAFT)
        yield TensorSpec("confidence_head.proj.weight", "BF16", (1, hidden + rank), Part.DRAFT)


def _fp8(stem: str, rows: int, columns: int, part: Part) -> Iterator[TensorSpec]:
    """An FP8 matrix and its scales, one for each tile of 32 rows and 32 columns."""
    yield TensorSpec(f"{stem}.weight", "F8_E4M3", (rows, columns), part)
    scale_shape = (math.ceil(rows / QUANT_BLOCK), math.ceil(columns / QUANT_BLOCK))
    yield TensorSpec(f"{stem}.scale", "F8_E8M0", scale_shape, part)
