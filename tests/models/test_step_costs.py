"""Costs of a step against sums by hand, and against what is known of the released model."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.step_costs import (
    DRAFT,
    OpCost,
    decode_shape,
    prefill_shape,
    roof_seconds,
    step_costs,
    step_roof_seconds,
)

CONFIG = released_config()
RATES = {"bf16": 2.0, "fp8": 4.0}


def decode_costs(**changes: int) -> dict[str, OpCost]:
    sizes = {"num_requests": 256, "context": 131_072, "num_drafts": 3, "num_ranks": 64} | changes
    return {cost.name: cost for cost in step_costs(CONFIG, decode_shape(**sizes))}


def test_products_of_the_released_model_by_hand() -> None:
    costs = decode_costs()
    rows, layers, hidden, inner = 1024, 40, 5120, 2304
    assert costs["shared expert"].operations == 2 * rows * layers * 3 * hidden * inner
    assert costs["routed experts"].operations == 6 * costs["shared expert"].operations
    assert costs["router"].operations == 2 * rows * layers * hidden * 384
    by_layer = 1280 * hidden + 512 * hidden + 64 * 512 * 1280 + hidden * 8 * 1024
    assert costs["attention linears"].operations == 2 * rows * layers * by_layer
    assert costs["attention output by groups"].operations == 2 * rows * layers * 8 * 4096 * 1024
    assert costs["head"].operations == 2 * rows * hidden * 129_280


def test_a_token_costs_what_was_counted_before() -> None:
    """38.7 GF a token without the draft, from the sums of single kernels at 131,072 tokens of context."""
    target = sum(cost.operations for name, cost in decode_costs().items() if not name.startswith(DRAFT))
    assert target / 1024 == pytest.approx(38.7e9, rel=0.01)


def test_local_expert_weights_are_read_once() -> None:
    one_rank, all_ranks = (
        decode_costs(num_requests=1, num_drafts=0),
        decode_costs(num_requests=1, num_drafts=0, num_ranks=1),
    )
    fp4 = 40 * 3 * 5120 * 2304 * (1 / 2 + 1 / 32)
    difference = all_ranks["routed experts"].num_bytes - one_rank["routed experts"].num_bytes
    assert difference == pytest.approx((384 - 6) * fp4)


def test_without_drafts_nothing_drafts() -> None:
    assert not any(name.startswith(DRAFT) for name in decode_costs(num_drafts=0))


def test_only_wanted_drafts_run_behind_the_keys_of_the_last_stage() -> None:
    whole, some = decode_costs(num_drafts=5), decode_costs(num_drafts=3)
    for name, share in (("head", 3 / 5), ("shared expert", (5 + 5 + 3) / 15)):
        assert some[DRAFT + name].operations == pytest.approx(share * whole[DRAFT + name].operations)


def test_only_kept_rows_of_a_prompt_run_behind_the_encoder() -> None:
    whole, cut = (
        {cost.name: cost for cost in step_costs(CONFIG, prefill_shape(num_tokens=4096, keep_tokens=kept, num_ranks=4))}
        for kept in (None, 140)
    )
    shared = whole["shared expert"].operations
    assert cut["shared expert"].operations == pytest.approx(shared * (4096 * 20 + 140 * 20) / (4096 * 40))


def test_the_candidate_pool_bounds_what_is_scored() -> None:
    few = dataclasses.asdict(decode_costs(context=8192)["index scores and selection"])
    many = dataclasses.asdict(decode_costs(context=131_072)["index scores and selection"])
    pairs = {8192: 3 * 4096 + 5 * 8192, 131_072: 3 * 65_536 + 131_072 + 4 * 16_384}
    assert many["operations"] / few["operations"] == pytest.approx(pairs[131_072] / pairs[8192])


def test_a_roof_is_the_larger_of_products_and_copies() -> None:
    product, copy = OpCost("a", 40.0, 2.0, "fp8"), OpCost("b", 0.0, 30.0)
    assert roof_seconds(product, RATES, 5.0) == 10.0
    assert roof_seconds(copy, RATES, 5.0) == 6.0
    assert step_roof_seconds([product, copy], RATES, 5.0) == 10.0
