"""Operations and bytes that one rank's step needs at the least, counted from the configuration.

A product of [T, K] with [N, K] is 2 T N K operations; it reads weights once and its rows, and writes what it makes.
Weights count in the released formats, activations in bf16 (FP8 where a product takes FP8), cache records packed as
released. Rows that cost nothing by themselves (norms, rotations, casts) ride on their neighbours. So this is what no
implementation can do without, not what this one moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from deepinfer.models.deepseek_v41.config import QUANT_BLOCK, ModelConfig

Rate = Literal["bf16", "fp8"]
DRAFT: Final = "draft: "  # begins the names of the draft's own costs
_FP8_BYTES = 1 + 1 / QUANT_BLOCK**2
_FP4_BYTES = 1 / 2 + 1 / QUANT_BLOCK
_ROW_BYTES = 2  # of a bf16 activation


@dataclass(slots=True, frozen=True)
class OpCost:
    """One kind of work of a step, all layers together; `rate`: which of the device's matrix rates bounds it."""

    name: str
    operations: float
    num_bytes: float
    rate: Rate = "bf16"


@dataclass(slots=True, frozen=True)
class StepShape:
    """`encoder_rows` run up to the first decoder layer, `decoder_rows` behind it, `head_rows` through the head.

    `scored[r]`: pairs of a row and an entry that it may see, with r tokens an entry; `keys[r]`: entries that have to be
    read for that. `last_visible`: tokens that the last row sees. `num_drafts`: that each of `num_requests` sequences
    makes. `num_ranks`: ranks that the routed experts are spread over, which also gives the rows that arrive here: as
    many as leave.
    """

    encoder_rows: int
    decoder_rows: int
    head_rows: int
    scored: dict[int, float]
    keys: dict[int, float]
    last_visible: int
    num_requests: int
    num_drafts: int
    num_ranks: int


def decode_shape(*, num_requests: int, context: int, num_drafts: int, num_ranks: int) -> StepShape:
    """A step of `num_requests` sequences of `context` tokens, each with its anchor and `num_drafts` drafts."""
    rows = num_requests * (1 + num_drafts)
    return StepShape(
        encoder_rows=rows,
        decoder_rows=rows,
        head_rows=rows,
        scored={ratio: rows * context / ratio for ratio in (1, 2)},
        keys={ratio: num_requests * context / ratio for ratio in (1, 2)},
        last_visible=context,
        num_requests=num_requests,
        num_drafts=num_drafts,
        num_ranks=num_ranks,
    )


def prefill_shape(*, num_tokens: int, keep_tokens: int | None, num_ranks: int) -> StepShape:
    """One whole prompt, however it is cut into chunks; only its last `keep_tokens` go behind the encoder."""
    kept = num_tokens if keep_tokens is None else min(keep_tokens, num_tokens)
    return StepShape(
        encoder_rows=num_tokens,
        decoder_rows=kept,
        head_rows=1,
        scored={2: num_tokens**2 / 4, 1: kept * (num_tokens - kept / 2)},
        keys={ratio: num_tokens / ratio for ratio in (1, 2)},
        last_visible=num_tokens,
        num_requests=1,
        num_drafts=0,
        num_ranks=num_ranks,
    )


def step_costs(config: ModelConfig, shape: StepShape) -> list[OpCost]:
    """Return the costs by kind of work, the same kinds for every step; a kind that a step lacks costs nothing."""
    totals: dict[str, OpCost] = {}
    for cost in (*_layers(config, shape), *_head(config, shape), *_draft(config, shape)):
        known = totals.get(cost.name, OpCost(cost.name, 0, 0, cost.rate))
        assert known.rate == cost.rate, cost.name
        totals[cost.name] = OpCost(
            cost.name, known.operations + cost.operations, known.num_bytes + cost.num_bytes, cost.rate
        )
    return list(totals.values())


def roof_seconds(cost: OpCost, rates: dict[str, float], copy_rate: float) -> float:
    """Return the least time of `cost` with `rates` operations and `copy_rate` bytes a second."""
    return max(cost.operations / rates[cost.rate], cost.num_bytes / copy_rate)


def step_roof_seconds(costs: list[OpCost], rates: dict[str, float], copy_rate: float) -> float:
    """Return the least time of a whole step in which products and copies could overlap perfectly."""
    products = sum(cost.operations / rates[cost.rate] for cost in costs)
    return max(products, sum(cost.num_bytes for cost in costs) / copy_rate)


def _layers(config: ModelConfig, shape: StepShape) -> Iterator[OpCost]:
    first_decoder = config.first_decoder_layer
    for layer in range(config.num_layers):
        writing = shape.encoder_rows if layer <= first_decoder else shape.decoder_rows
        rows = shape.encoder_rows if layer < first_decoder else shape.decoder_rows
        yield from _attention(config, layer, shape, writing, rows)
        yield from _experts(config, rows, shape.num_ranks, config.n_routed_experts, config.num_experts_per_tok)
        yield _streams(config, writing)
        yield _streams(config, rows)
        if layer in config.engram_layer_ids:
            width = config.num_engram_rows_per_token * config.engram_head_dim
            yield _product("n-gram memory", rows, (config.hc_mult + 1) * config.hidden_size, width, "fp8")
            table = rows * width * (1 + 1 / QUANT_BLOCK)
            yield OpCost("n-gram memory", 0, table + _stream_bytes(config, rows), "fp8")


def _attention(config: ModelConfig, layer: int, shape: StepShape, writing: int, rows: int) -> Iterator[OpCost]:
    """`writing` rows make keys, `rows` of them ask."""
    name, hidden, dim = "attention linears", config.hidden_size, config.head_dim
    width = config.num_attention_heads * dim
    out = config.o_groups * config.o_lora_rank
    yield _product(name, writing, config.q_lora_rank + dim, hidden, "fp8")
    yield _product(name, rows, width, config.q_lora_rank, "fp8")
    yield _product("attention output by groups", rows, out, width // config.o_groups, "bf16", in_width=width)
    yield _product(name, rows, hidden, out, "fp8")
    ratio = config.compress_ratio(layer)
    selected = min(config.index_topk, shape.last_visible // ratio) if ratio else 0
    window = min(config.sliding_window, shape.last_visible)
    read = window * _window_bytes(config) + selected * _main_bytes(config)
    yield OpCost(
        "attention",
        4.0 * rows * width * (window + selected),
        rows * (read + 2 * width * _ROW_BYTES) + writing * _window_bytes(config),
    )
    if config.is_kv_source(layer):
        entries = writing // ratio
        yield _product("compressors", writing, dim * (2 if ratio > 1 else 1), hidden, "bf16")
        yield _product("compressors", entries, config.index_head_dim, dim, "bf16")
        yield OpCost("compressors", 0, entries * (_main_bytes(config) + _index_bytes(config)))
    if config.is_index_source(layer):
        yield from _selection(config, layer, ratio, shape, rows)


def _selection(config: ModelConfig, layer: int, ratio: int, shape: StepShape, rows: int) -> Iterator[OpCost]:
    heads, dim = config.index_n_heads, config.index_head_dim
    yield _product("index linears", rows, heads * dim, config.q_lora_rank, "fp8")
    yield _product("index linears", rows, heads, config.hidden_size, "fp8", weight_bytes=2)
    scored, keys = shape.scored[ratio], shape.keys[ratio]
    if config.inside_candidates(layer):
        pool = config.candidate_topk_blocks * config.candidate_block_size
        scored, keys = min(scored, rows * pool), min(keys, shape.num_requests * pool)
    operations = 2.0 * scored * heads * dim
    yield OpCost("index scores and selection", operations, keys * _index_bytes(config) + rows * 4 * heads, "fp8")


def _experts(config: ModelConfig, rows: int, num_ranks: int, num_experts: int, num_chosen: int) -> Iterator[OpCost]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield _product("router", rows, num_experts, hidden, "bf16")
    yield _product("shared expert", rows, 2 * inner, hidden, "fp8")
    yield _product("shared expert", rows, hidden, inner, "fp8")
    arrived, local = rows * num_chosen, num_experts // num_ranks
    yield _product("routed experts", arrived, 2 * inner, hidden, "fp8", weight_bytes=_FP4_BYTES * local)
    yield _product("routed experts", arrived, hidden, inner, "fp8", weight_bytes=_FP4_BYTES * local)
    yield OpCost("sum of experts", 0, (arrived + 2 * rows) * hidden * _ROW_BYTES)


def _head(config: ModelConfig, shape: StepShape) -> Iterator[OpCost]:
    vocab = config.vocab_size
    yield _product("head", shape.head_rows, vocab, config.hidden_size, "bf16", out_bytes=4)
    yield OpCost("sampling", 0, shape.head_rows * vocab * 4.0)


def _draft(config: ModelConfig, shape: StepShape) -> Iterator[OpCost]:
    """Whole blocks up to the last stage's keys, the wanted drafts behind them; ring keys of the target's rows."""
    if not shape.num_drafts or not config.num_draft_stages:
        return
    hidden, stages = config.hidden_size, config.num_draft_stages
    whole, wanted = shape.num_requests * config.dspark_block_size, shape.num_requests * shape.num_drafts
    taps = len(config.dspark_target_layer_ids)
    costs = [_product("ring keys", shape.decoder_rows, hidden, taps * hidden, "fp8")]
    for stage in range(stages):
        rows = wanted if stage == stages - 1 else whole
        costs += _attention(config, config.num_layers + stage, shape, whole, rows)
        chosen, experts = config.dspark_num_experts_per_tok, config.dspark_n_routed_experts
        costs += _experts(config, rows, shape.num_ranks, experts, chosen)
        costs += [_streams(config, whole), _streams(config, rows)]
        costs.append(_product("ring keys", shape.decoder_rows, config.head_dim, hidden, "fp8"))
    costs.append(_product("head", wanted, config.vocab_size, hidden, "bf16", out_bytes=4))
    for _ in range(shape.num_drafts):
        costs.append(_product("Markov head", shape.num_requests, config.vocab_size, config.dspark_markov_rank, "bf16"))
    for cost in costs:
        yield replace(cost, name=f"{DRAFT}{cost.name}")


def _streams(config: ModelConfig, rows: int) -> OpCost:
    """One sublayer's mixing: streams read and written, its input written, its output read, coefficients computed."""
    width = config.hc_mult * config.hidden_size
    mixed = config.hc_mult * (2 + config.hc_mult)
    moved = _stream_bytes(config, rows) + 2 * rows * config.hidden_size * _ROW_BYTES
    return OpCost("hyper-connections", 2.0 * rows * mixed * width, moved + 4 * mixed * width)


def _stream_bytes(config: ModelConfig, rows: int) -> float:
    """Streams read once and written once."""
    return 2.0 * rows * config.hc_mult * config.hidden_size * _ROW_BYTES


def _product(
    name: str,
    rows: float,
    n: int,
    k: int,
    rate: Rate,
    *,
    weight_bytes: float | None = None,
    in_width: int | None = None,
    out_bytes: int = _ROW_BYTES,
) -> OpCost:
    """`in_width`: of a row, where groups of it meet different weights."""
    each = weight_bytes if weight_bytes is not None else (_FP8_BYTES if rate == "fp8" else 2)
    read = rows * (in_width or k) * (1 if rate == "fp8" else _ROW_BYTES)
    return OpCost(name, 2.0 * rows * n * k, n * k * each + read + rows * n * out_bytes, rate)


def _window_bytes(config: ModelConfig) -> float:
    return config.head_dim * (1 + 1 / 32)


def _main_bytes(config: ModelConfig) -> float:
    return config.head_dim * (1 / 2 + 1 / 16)


def _index_bytes(config: ModelConfig) -> float:
    return config.index_head_dim * (1 / 2 + 1 / 32)
