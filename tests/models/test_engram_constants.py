"""Hash constants of the n-gram memory against the official implementation and two published test vectors."""

from __future__ import annotations

import json

import pytest
from checkpoint_case import W16

from deepinfer.models.deepseek_v41.engram_constants import EngramConstants, build_engram_constants
from deepinfer.models.deepseek_v41.released import released_config

GOLDEN = json.loads((W16.parent / "engram.json").read_text())


@pytest.mark.parametrize("variant", ["w16", "w128"])
def test_constants_of_the_golden_checkpoints(variant: str) -> None:
    golden, config = GOLDEN[variant], GOLDEN[variant]["config"]
    constants = build_engram_constants(
        tuple(config["engram_layer_ids"]),
        vocab_size=config["engram_vocab_size"],
        num_heads=config["engram_n_heads"],
        max_ngram_size=config["engram_max_ngram_size"],
        num_classes=config["engram_compressed_vocab_size"],
    )
    assert [[list(order) for order in layer.primes] for layer in constants] == golden["primes"]
    assert [[offset for order in layer.offsets for offset in order] for layer in constants] == golden["offsets"]
    assert [list(layer.multipliers) for layer in constants] == golden["multipliers"]
    assert [layer.num_rows for layer in constants] == config["engram_num_embeddings"]


def test_constants_of_the_released_model() -> None:
    first, second = released_config().engram_constants()
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert [order[0] for order in first.primes] == [16000057, 16000189, 16000339]
    assert [order[-1] for order in second.primes] == [16000627, 16000769, 16000889]
    assert (first.num_rows, second.num_rows) == (384006168, 384016682)


def _rows(constants: EngramConstants, window: list[int]) -> list[int]:
    """Table rows of a position from its own compressed id and the three before it."""
    rows, mixed = [], window[0] * constants.multipliers[0]
    for order, (primes, offsets) in enumerate(zip(constants.primes, constants.offsets, strict=True), start=1):
        mixed ^= window[order] * constants.multipliers[order]
        rows += [mixed % prime + offset for prime, offset in zip(primes, offsets, strict=True)]
    return rows


def test_published_rows_of_the_released_model() -> None:
    """Compressed ids 0, 5, 17, 99091, 42; the pad class 2 stands before the sequence."""
    first, second = released_config().engram_constants()
    rows = _rows(first, [0, 2, 2, 2])
    assert (rows[:3], rows[-1]) == ([5702652, 24393184, 39183301], 380066193)
    rows = _rows(first, [42, 99091, 17, 5])
    assert (rows[:3], rows[-1]) == ([13131409, 22107638, 46286683], 370256351)
    rows = _rows(second, [42, 99091, 17, 5])
    assert (rows[:3], rows[-1]) == ([3275938, 25911066, 45539186], 382145690)
    rows = _rows(first, [42, 2, 2, 2])
    assert (rows[0], rows[-1]) == (5873501, 382017429)
