"""The operations a model is made of: one typed signature each, with shapes, dtypes, special values and tie rules.

T rows, D hidden, H heads, d head_dim, M residual streams. "model dtype" is `Numerics.dtype`; sums are float32 with one
rounding at the end. An op that multiplies by a weight has `prepare`, called once at load; what it returns belongs to
that implementation alone. The arithmetic is that of the released reference implementation of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

RecordKind = Literal["window", "main", "index"]


@dataclass(slots=True, frozen=True)
class Numerics:
    """Where values are rounded: `dtype` between operations, FP8 activations of quantised linears, cache records.

    `quantise_caches` covers window rows (FP8), compressed rows (FP4, E4M3 scales), index keys and queries (FP4, E8M0).
    """

    dtype: torch.dtype
    quantise_activations: bool
    quantise_caches: bool


REFERENCE_NUMERICS = Numerics(torch.bfloat16, quantise_activations=True, quantise_caches=True)
FP32_NUMERICS = Numerics(torch.float32, quantise_activations=False, quantise_caches=False)


class Pack(Protocol):
    """Values [..., width] in the model dtype -> records uint8 [..., num_bytes], written into `out` if that is given."""

    def __call__(self, values: Tensor, *, out: Tensor | None = None) -> Tensor: ...


@dataclass(slots=True, frozen=True)
class RecordFormat:
    """Layout of one cache row in device memory.

    `unpack` is the inverse of `pack` up to the rounding of the format and returns float32 values that are exact in the
    model dtype. `name` is part of the layout digest.
    """

    name: str
    width: int
    num_bytes: int
    pack: Pack
    unpack: Callable[[Tensor], Tensor]


@dataclass(slots=True, frozen=True)
class PagedRows:
    """Entries of many sequences in one flat pool.

    `pool` uint8 [rows, record.num_bytes]; entry j of sequence b is row
    `block_table[b, j // entries_per_block] * entries_per_block + j % entries_per_block`.
    """

    pool: Tensor
    record: RecordFormat
    block_table: Tensor
    entries_per_block: int


@dataclass(slots=True, frozen=True)
class CandidateRule:
    """Keep the `num_blocks` blocks of `block_size` neighbouring entries with the largest score; the newest always."""

    num_blocks: int
    block_size: int


@dataclass(slots=True, frozen=True)
class Selection:
    """`entries` [T, k] int64 ascending, -1 behind the last.

    `candidates` [T, num_blocks] int64, when a rule was given: the kept blocks, ascending, -1 behind the last.
    """

    entries: Tensor
    candidates: Tensor | None


@dataclass(slots=True, frozen=True)
class MixCoefficients:
    """Hyper-connection coefficients, float32: `pre` [T, M], `post` [T, M], `mix` [T, M (from), M (to)]."""

    pre: Tensor
    post: Tensor
    mix: Tensor


@dataclass(slots=True, frozen=True)
class ExpertRows:
    """What experts made of copies of rows: copy c of row r is row `places[r, c]` of `values` [P, D] model dtype.

    `places` [R, C] int32 or int64; -1: nothing, which counts as zeros. Rows of `values` that no place names may hold
    anything.
    """

    values: Tensor
    places: Tensor


@dataclass(slots=True, frozen=True)
class ExpertSum:
    """What `CombineExperts` would make of `rows` and `shared` [T, D], for an op that can add them up by itself."""

    rows: ExpertRows
    shared: Tensor


@dataclass(slots=True, frozen=True)
class CastRows:
    """Rows [T, D] in FP8, E4M3 with a power-of-two scale for each 128 columns: for products here, and to be sent.

    `packed` uint8 [T, B]: D codes, then D / 128 scales as E8M0 bytes; the rest of a row may hold anything. `scales`
    float32 [T, D / 128] are the same scales, column by column in memory, as products read them.
    """

    packed: Tensor
    scales: Tensor


@dataclass(slots=True, frozen=True)
class Activations:
    """What a sublayer reads: `values` [T, D] in the model dtype, and the same after the FP8 cast, if it was made."""

    values: Tensor
    cast: CastRows | None = None


class RecordFormats(Protocol):
    """Record formats of the device. `kind` window, main or index; `width` values per row, a multiple of 32."""

    def __call__(self, kind: RecordKind, width: int) -> RecordFormat: ...


class StoreRows(Protocol):
    """Write packed `records` uint8 [n, bytes] to rows `rows` [n] int64 of `pool`, in place.

    The rows are distinct, but for -1: such a record is not written.
    """

    def __call__(self, pool: Tensor, rows: Tensor, records: Tensor) -> None: ...


class Linear(Protocol):
    """y = x W^T without activation quantisation. `weight` [N, K] bf16 or float32; x [T, K]; y [T, N] `out_dtype`."""

    def prepare(self, weight: Tensor) -> Any: ...

    def __call__(self, x: Tensor, weight: Any, *, out_dtype: torch.dtype) -> Tensor: ...


class RoughLinear(Protocol):
    """About x W^T, for scores that only propose: an implementation may round both operands to FP8 and y to bf16.

    `weight` [N, K] bf16; x [T, K] model dtype; y [T, N] float32 or bf16.
    """

    def prepare(self, weight: Tensor) -> Any: ...

    def __call__(self, x: Tensor, weight: Any) -> Tensor: ...


class QuantizedLinear(Protocol):
    """y = x W^T with FP8 activations: E4M3 per row and 32 columns, scale 2^ceil(log2(max(amax, 1e-4) / 448)).

    `weight` float8_e4m3fn [N, K], `scale` E8M0 bytes uint8 [ceil(N/32), ceil(K/32)]; x [T, K], y [T, N] model dtype.
    `after_norm` multiplies `RMSNorm(x, norm)`, rows of x may lie apart. `after_swiglu` multiplies the SwiGLU of gates
    and ups side by side, `both` [T, 2 K]: silu(min(gate, limit)) * clamp(up, -limit, limit) in float32. Both round to
    the model dtype in between.
    `reads_casts`: it multiplies `CastRows`. Then `cast` may be those of x, which are the ones that it would make.
    """

    reads_casts: ClassVar[bool]

    def prepare(self, weight: Tensor, scale: Tensor) -> Any: ...

    def __call__(self, x: Tensor, weight: Any, *, cast: CastRows | None = None) -> Tensor: ...

    def after_norm(self, x: Tensor, norm: Tensor, weight: Any, *, epsilon: float) -> Tensor: ...

    def after_swiglu(self, both: Tensor, weight: Any, *, limit: float) -> Tensor: ...


class GroupedLinear(Protocol):
    """Block-diagonal map, activations not quantised: x [T, G, K] times group g's [N, K] -> [T, G * N] model dtype.

    `weight` float8_e4m3fn [G * N, K] with E8M0 bytes per 32 x 32 tile.
    """

    def prepare(self, weight: Tensor, scale: Tensor, *, num_groups: int) -> Any: ...

    def __call__(self, x: Tensor, weight: Any) -> Tensor: ...


class RMSNorm(Protocol):
    """w * x * rsqrt(mean(x^2) + epsilon) over the last axis, float32 with one rounding to the model dtype."""

    def __call__(self, x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor: ...


class Rotate(Protocol):
    """Rotary embedding of the last 2 * `cosine.shape[1]` channels of x [T, ..., n], neighbours (2p, 2p + 1) paired.

    `cosine`, `sine` float32 [T, R / 2]. Computed in float32, one rounding. `inverse` turns backwards. The caller gives
    x up: the result may be x itself, turned in place.
    """

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, *, inverse: bool = False) -> Tensor: ...


class MixCoefficientsOf(Protocol):
    """Coefficients of a sublayer from `streams` [T, M, D] model dtype, before the sublayer's update.

    `function` float32 [2M + M*M, M*D], `scale` [3], `base` [2M + M*M]. One mean square over all M*D values.
    Sinkhorn: softmax over targets, columns, then `num_iterations - 1` times rows and columns; all float32.
    """

    def prepare(self, function: Tensor) -> Any: ...

    def __call__(
        self,
        streams: Tensor,
        function: Any,
        scale: Tensor,
        base: Tensor,
        *,
        epsilon: float,
        mix_epsilon: float,
        num_iterations: int,
    ) -> MixCoefficients: ...


class OpenStreams(Protocol):
    """`num_streams` equal streams [T, M, D] model dtype: rows `token_ids` [T] int64 of `embedding` [V, D].

    Also returns the first `pre` float32 [T, M], which takes stream 0 alone.
    """

    def __call__(self, embedding: Tensor, token_ids: Tensor, *, num_streams: int) -> tuple[Tensor, Tensor]: ...


class CollapseStreams(Protocol):
    """sum_j pre[:, j] * streams[:, j] in float32 -> [T, D] model dtype."""

    def __call__(self, streams: Tensor, pre: Tensor) -> Tensor: ...


class UpdateStreams(Protocol):
    """Stream k becomes post[:, k] * y + sum_j mix[:, j, k] * streams[:, j]; y [T, D]; returns [T, M, D]."""

    def __call__(self, streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor: ...


class AdvanceStreams(Protocol):
    """From one sublayer to the next: `UpdateStreams`, `CollapseStreams` by `pre`, `RMSNorm` by `weight` [D].

    `y` may be a sum of experts that is still to be formed. Returns the new streams [T, M, D] and what the next sublayer
    reads [T, D]. Rounds where the single ops do. `with_cast`: the FP8 cast of the latter is wanted, too; an
    implementation may leave it to the readers.
    """

    def __call__(
        self,
        streams: Tensor,
        y: Tensor | ExpertSum,
        post: Tensor,
        mix: Tensor,
        pre: Tensor,
        weight: Tensor,
        *,
        epsilon: float,
        with_cast: bool = False,
    ) -> tuple[Tensor, Activations]: ...


class EngramRows(Protocol):
    """Table rows [T, (N - 1) * heads] int64 of each position's n-grams of 2 .. N tokens.

    `history` int64 [T, N]: compressed ids of positions i, i - 1, ...; `multipliers` [N], `primes` and `offsets`
    [N - 1, heads], all int64. Row = (xor of history[s] * multipliers[s], s < n) mod prime + offset.
    """

    def __call__(self, history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor: ...


class EngramLookup(Protocol):
    """Dequantised rows side by side: `rows` [T, R] -> [T, R * width] model dtype (exact).

    `table` float8_e4m3fn [n, width], `scale` E8M0 bytes [n, width / 32]; the table may live in host memory.
    `capturable`: whether a graph of `device` may hold look-ups in this table; not where the host has to do them.
    """

    def capturable(self, table: Tensor, scale: Tensor, *, device: torch.device) -> bool: ...

    def __call__(self, rows: Tensor, table: Tensor, scale: Tensor) -> Tensor: ...


class EngramGate(Protocol):
    """Add the gated memory to every stream: X_c += sigmoid(copysign(sqrt(max(|s_c|, 1e-6)), s_c)) * value.

    s_c = sum(X_c * q_weight_c * k_weight_c * key_c) * rsqrt(mean X_c^2 + eps) * rsqrt(mean key_c^2 + eps) * D^-0.5.
    `streams` [T, M, D], `memory` [T, (M + 1) * D]: M keys, then the value; weights [M, D]. float32, one rounding.
    """

    def __call__(
        self, streams: Tensor, memory: Tensor, query_weight: Tensor, key_weight: Tensor, *, epsilon: float
    ) -> Tensor: ...


class PairCompress(Protocol):
    """Mean of the two tokens of a pair, weighted by a softmax over the two, per channel -> [T, d] model dtype.

    `rows` [T, 2 d] float32: values, then gates. The pair of row t is t itself and the row before it in its sequence:
    row `first_rows[t]` ([T] int64) of `stored` [n, 2 d] float32, or row t - 1 of `rows` where that is -1 (the result
    for row 0 is undefined then).
    """

    def __call__(self, rows: Tensor, stored: Tensor, first_rows: Tensor) -> Tensor: ...


class LatentRecords(Protocol):
    """Records uint8 [T, bytes] of latents: `record.pack(Rotate(RMSNorm(latent)))`, written into `out` if that is given.

    `latent` [T, d] in the model dtype, rows may lie apart; rounds where the three do.
    """

    def __call__(
        self,
        latent: Tensor,
        weight: Tensor,
        cosine: Tensor,
        sine: Tensor,
        *,
        epsilon: float,
        record: RecordFormat,
        out: Tensor | None = None,
    ) -> Tensor: ...


class LocateEntries(Protocol):
    """Pool rows int32 [T, k] of `entries` [T, k] int64 of each row's own sequence, see `PagedRows`; -1 stays -1."""

    def __call__(
        self, entries: Tensor, row_sequence: Tensor, block_table: Tensor, *, entries_per_block: int
    ) -> Tensor: ...


class IndexSelect(Protocol):
    """Score the visible entries of each row's own sequence and keep the `num_selected` best; ties: the lower entry.

    score[t, j] = sum_h relu(query[t, h] . key[j]) * weights[t, h], for j < visible[t]. `query` [T, Hi, di] after
    rotation (quantised here), `weights` [T, Hi] already scaled. With the model dtype bf16 the dot products, the
    weighted products and the head sum are each rounded to bf16. `rule` asks to publish a pool: blocks by their largest
    score, ties to the lower block, the newest visible block always in it. With `candidates`, such a pool of blocks of
    `rule.block_size`, the choice is limited to their entries, and they are what is published.
    """

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        keys: PagedRows,
        *,
        sequence_starts: Tensor,
        row_sequence: Tensor,
        visible: Tensor,
        num_selected: int,
        candidates: Tensor | None,
        rule: CandidateRule | None,
    ) -> Selection: ...


class SparseAttention(Protocol):
    """Attention of each row over rows named by number; keys and values are the same vectors.

    `query` [T, H, d] model dtype. `window_rows` [T, W] int64: below `len(ring)` a row of `ring` (uint8 records), else a
    row of `step_records` (this step's own rows) after subtracting it; `main_rows` [T, k] int32 or int64: rows of
    `main`. -1 = no key, allowed anywhere. `sink` float32 [H] only enters the denominator. A row without keys gives
    zeros.
    Returns [T, H, d] model dtype; probabilities are rounded to the model dtype before they meet the values.

    `located`: what `locate` returned for the same keys, so that it can be found out before there are queries.
    """

    def locate(
        self,
        *,
        ring: Tensor,
        step_records: Tensor,
        window_rows: Tensor,
        window_record: RecordFormat,
        main: Tensor | None,
        main_rows: Tensor | None,
    ) -> Any: ...

    def __call__(
        self,
        query: Tensor,
        *,
        ring: Tensor,
        step_records: Tensor,
        window_rows: Tensor,
        window_record: RecordFormat,
        main: Tensor | None,
        main_rows: Tensor | None,
        main_record: RecordFormat | None,
        sink: Tensor,
        scale: float,
        located: Any = None,
    ) -> Tensor: ...


class RouteTokens(Protocol):
    """Choose experts: s = sqrt(softplus(hidden router^T)), the k largest of s + bias, ties to the lower id.

    `hidden` [T, D] model dtype, `router` [E, D] bf16: products and sums in float32; `bias` float32 [E]. Returns ids
    [T, k] int64 ascending and weights [T, k] float32 = s / (sum of the chosen s + 1e-20) * `scale`.
    Rows of `is_padding` [T] bool choose nobody: their ids are -1.
    """

    def prepare(self, router: Tensor) -> Any: ...

    def __call__(
        self, hidden: Tensor, router: Any, bias: Tensor, is_padding: Tensor, *, num_chosen: int, scale: float
    ) -> tuple[Tensor, Tensor]: ...


class ExpertMLP(Protocol):
    """Routed experts: row r of `rows` [R, ...] goes to the experts `expert_ids[r]` ([R, C] int64, -1: to none) with
    the routing `weights` [R, C] float32. Rows are as `pack` made them for these experts, perhaps on another rank: the
    activations themselves, or their cast. How they look depends on shapes and on `few_rows`, not on weights.

    FP4 weights as released: `gate`, `up` uint8 [E, I, D/2], `down` uint8 [E, D, I/2] (low nibble = even column), scales
    E8M0 bytes per row and 32 columns; FP8 activations and SwiGLU as in `QuantizedLinear`. The weight multiplies
    the SwiGLU before it is rounded.
    `few_rows`: no step has more than a few rows for an expert, so that memory counts for more than speed.
    `expected_copies`: about how many of the R * C copies go to an expert, by default all; it changes no bits.
    """

    def prepare(
        self,
        gate: Tensor,
        gate_scale: Tensor,
        up: Tensor,
        up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        *,
        few_rows: bool = False,
    ) -> Any: ...

    def pack(self, activations: Activations, experts: Any) -> Tensor: ...

    def __call__(
        self,
        rows: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        experts: Any,
        *,
        limit: float,
        expected_copies: int | None = None,
    ) -> ExpertRows: ...


class CombineExperts(Protocol):
    """float32 sum of the `expert_rows` of T tokens in column order, then `shared` [T, D]; one rounding -> [T, D]."""

    def __call__(self, expert_rows: ExpertRows, shared: Tensor) -> Tensor: ...


class GumbelArgmax(Protocol):
    """Draw a token id a row from softmax(scores / temperature): arg-max of the quotient + noise, ties to the lower id.

    `scores` [R, V] float32 (or bf16 with a bias), -inf for excluded ids; `bias` [R, V] float32, added first in float32;
    `temperatures` [R] float32: the quotient is a true float32 division, then the noise is added in float32; 0 means no
    noise and no division, the arg-max of the scores. `seeds`, `positions` [R] int64; 0 <= `purpose` < 256. Noise as in
    `reference/sampling.py`: its words are the same everywhere, its float values up to a few last bits. Returns [R]
    int64; -1 for a row that has a NaN, +inf or nothing but -inf.
    """

    def __call__(
        self,
        scores: Tensor,
        seeds: Tensor,
        positions: Tensor,
        temperatures: Tensor,
        *,
        purpose: int,
        bias: Tensor | None = None,
    ) -> Tensor: ...
