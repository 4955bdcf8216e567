"""The loaded weights of one rank: a tree of plain tensors, quantised ones as released. Kernels multiply them.

Shapes use D hidden, H heads, d head_dim, M = hc_mult, E experts of this rank in this layer. A linear map is y = x W^T,
weights are [out, in], no map has a bias. Scales are E8M0 **bytes** (uint8, value 2^(byte - 127)), never a float dtype.
The format facts are the released checkpoint's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """FP8 matrix: `weight` float8_e4m3fn [N, K], `scale` uint8 [ceil(N/32), ceil(K/32)], one per 32 x 32 tile."""

    weight: Tensor
    scale: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Fp4Experts:
    """Routed experts of one layer on this rank, stacked; row e belongs to logical expert `expert_ids[e]`.

    `w1` (gate), `w3` (up): uint8 [E, I, D/2]; `w2` (down): uint8 [E, D, I/2], I = moe_intermediate_size. Two e2m1 codes
    a byte, the low nibble is the even column. Scales uint8 [E, rows, columns/32], one per row and 32 columns.
    `expert_ids` is a tuple in the order that the loader was given; a redundant expert may stand twice.
    """

    w1: Tensor
    w1_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    w3: Tensor
    w3_scale: Tensor
    expert_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert of every token: `w1` (gate), `w3` (up) [I, D] and `w2` (down) [D, I]."""

    w1: QuantizedLinear
    w2: QuantizedLinear
    w3: QuantizedLinear


@dataclasses.dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router and experts. `gate_weight` bf16 [experts, D] over ALL logical experts; `gate_bias` float32 [experts].

    The bias takes part in the selection only. The image bias of the checkpoint is not loaded: text never uses it.
    """

    gate_weight: Tensor
    gate_bias: Tensor
    experts: Fp4Experts
    shared: SharedExpert


@dataclasses.dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Compressor of a KV source. bf16 `wkv` [d, D], `norm` [d]; `wgate` bf16 [d, D] at ratio 2, None at ratio 1."""

    wkv: Tensor
    norm: Tensor
    wgate: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Query side of an index source: `wq_b` [index heads * index dim, q rank], `weights_proj` bf16 [index heads, D].

    Key side, on a KV source only (else None): `wk` bf16 [index dim, d], `k_norm` bf16 [index dim].
    """

    wq_b: QuantizedLinear
    weights_proj: Tensor
    wk: Tensor | None
    k_norm: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`wq_a` [q rank, D], `q_norm` bf16 [q rank], `wq_b` [H*d, q rank], `wkv` [d, D], `kv_norm` bf16 [d],
    `wo_a` [groups * o rank, H*d / groups] (block diagonal by groups, used as bf16), `wo_b` [D, groups * o rank],
    `attn_sink` float32 [H]. `compressor` on KV sources only, `indexer` on index sources only.
    """

    wq_a: QuantizedLinear
    q_norm: Tensor
    wq_b: QuantizedLinear
    wkv: QuantizedLinear
    kv_norm: Tensor
    wo_a: QuantizedLinear
    wo_b: QuantizedLinear
    attn_sink: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclasses.dataclass(frozen=True, slots=True)
class HyperConnectionWeights:
    """Mixing of one sublayer, float32: `fn` [2M + M*M, M*D], `base` [2M + M*M], `scale` [3].

    `scale` is a parameter, not a quantisation scale.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class EngramTable:
    """A share of one layer's n-gram table: rows `first_row` .. `first_row + len(weight) - 1` of `num_rows`.

    `weight` float8_e4m3fn [rows, engram dim], `scale` uint8 [rows, engram dim / 32], one per row and 32 columns.
    A whole table lies in host memory, also for a rank with another device; a share lies on the rank's device.
    """

    weight: Tensor
    scale: Tensor
    first_row: int
    num_rows: int

    @property
    def is_share(self) -> bool:
        """Whether other ranks hold rows that this one lacks."""
        return len(self.weight) < self.num_rows


@dataclasses.dataclass(frozen=True, slots=True)
class EngramWeights:
    """`table`, `wkv` [(M + 1) * D, rows per token * engram dim], `q_weight`, `k_weight` bf16 [M, D]."""

    table: EngramTable
    wkv: QuantizedLinear
    q_weight: Tensor
    k_weight: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """One backbone layer; norms bf16 [D]. `engram` is None on layers without n-gram memory."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperConnectionWeights
    hc_ffn: HyperConnectionWeights
    attention: AttentionWeights
    moe: MoeWeights
    engram: EngramWeights | None


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRingWeights:
    """From the target's features to each draft stage's keys: `main_proj` [D, taps * D], `main_norm` bf16 [D].

    By stage: `wkv[s]` [d, D], `kv_norm[s]` bf16 [d], the tensors of the stage's own attention.
    """

    main_proj: QuantizedLinear
    main_norm: Tensor
    wkv: tuple[QuantizedLinear, ...]
    kv_norm: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DraftWeights:
    """What drafts: `stages[s]` is shaped like a window-only layer with experts of its own number.

    `norm` bf16 [D] before the head, which is the target's; `markov_embed`, `markov_head` bf16 [vocabulary, R];
    `confidence` bf16 [1, D + R].
    """

    stages: tuple[LayerWeights, ...]
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """All of a rank. `embed`, `head` bf16 [vocabulary, D], `norm` bf16 [D]; `layers`: the backbone's, in order.

    They are taken once, and may be made while they are taken, so that each makes room for the next.

    `draft_rings` where drafts are in use, `draft` also only on a rank that makes them.
    """

    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: Iterable[LayerWeights]
    draft_rings: DraftRingWeights | None = None
    draft: DraftWeights | None = None


def tensors_of(tree: object) -> Iterator[Tensor]:
    """Yield every tensor of a dataclass of this file, in field order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from tensors_of(getattr(tree, field.name))


def num_bytes(tree: object) -> int:
    """Return the bytes that the tensors of `tree` occupy; one that stands twice counts once."""
    tensors = {id(tensor): tensor for tensor in tensors_of(tree)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
