"""Hand-over of a sequence's cache: decoding behind an import gives the bits of decoding without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.golden_case import golden_model
from support.step_runner import Chunk, StepRunner

W16 = Path(__file__).parents[1] / "golden" / "w16"
LENGTHS = (1, 7, 15, 16, 17, 49)  # 1, odd, window - 1, window, window + 1, 3 windows + 1


@pytest.fixture(params=["fp32_noq", "ref"])
def runner(request: pytest.FixtureRequest) -> StepRunner:
    """Slots 1 to 6 hold a prompt each, slots 7 to 12 the leftovers of other sequences."""
    runner = StepRunner(golden_model(W16, request.param), num_slots=12, max_tokens=64)
    generator = torch.Generator().manual_seed(3)
    lengths = (*LENGTHS, *(40 for _ in LENGTHS))
    runner.run(
        *(
            Chunk(slot, 0, torch.randint(3, 512, (length,), generator=generator))
            for slot, length in enumerate(lengths, start=1)
        )
    )
    return runner


def hand_over(runner: StepRunner, source: int, target: int, num_tokens: int) -> None:
    parts = runner.model.export_kv(
        runner.caches, slot=source, block_ids=runner.block_ids(source, num_tokens), num_tokens=num_tokens
    )
    runner.model.import_kv(
        runner.caches,
        slot=target,
        block_ids=runner.block_ids(target, num_tokens),
        num_tokens=num_tokens,
        parts=parts,
    )
    runner.token_table[target] = runner.token_table[source]


def test_decoding_behind_an_import_gives_the_same_bits(runner: StepRunner) -> None:
    for slot, length in enumerate(LENGTHS, start=1):
        hand_over(runner, slot, slot + 6, length)
    for step in range(3):
        chunks = [
            Chunk(slot + half, length + step, torch.tensor([7 + 31 * step + slot]))
            for half in (0, 6)
            for slot, length in enumerate(LENGTHS, start=1)
        ]
        logits = runner.run(*chunks)
        for length, kept, imported in zip(LENGTHS, logits[:6], logits[6:], strict=True):
            assert torch.equal(kept, imported), f"{length} tokens, step {step}"


def test_bytes_survive_a_second_hand_over(runner: StepRunner) -> None:
    model, caches = runner.model, runner.caches
    for slot, length in enumerate(LENGTHS, start=1):
        hand_over(runner, slot, slot + 6, length)
        first, second = (
            model.export_kv(caches, slot=place, block_ids=runner.block_ids(place, length), num_tokens=length)
            for place in (slot, slot + 6)
        )
        for part, again in zip(first, second, strict=True):
            assert (part.group, part.first_position, part.num_records) == (
                again.group,
                again.first_position,
                again.num_records,
            )
            assert torch.equal(part.data, again.data)


def test_an_export_into_given_memory_has_the_same_bytes_and_goes_no_further(runner: StepRunner) -> None:
    model, caches = runner.model, runner.caches
    for slot, length in enumerate(LENGTHS, start=1):
        where = {"slot": slot, "block_ids": runner.block_ids(slot, length), "num_tokens": length}
        plain = model.export_kv(caches, **where)
        num_bytes = model.kv_bytes(caches, length)
        memory = torch.full((num_bytes + 40,), 77, dtype=torch.uint8)
        parts = model.export_kv(caches, **where, into=memory)
        assert torch.equal(torch.cat([part.data for part in plain]), memory[:num_bytes])
        assert memory[num_bytes:].tolist() == [77] * 40
        for part, expected in zip(parts, plain, strict=True):
            assert (part.group, part.first_position, part.num_records) == (
                expected.group,
                expected.first_position,
                expected.num_records,
            )
            assert torch.equal(part.data, expected.data)


def test_sizes_follow_the_record_formats(runner: StepRunner) -> None:
    layout = runner.caches.layout
    parts = {
        part.group: part
        for part in runner.model.export_kv(runner.caches, slot=6, block_ids=runner.block_ids(6, 49), num_tokens=49)
    }
    entry = layout.main_record.num_bytes + layout.index_record.num_bytes
    assert parts["global"].data.numel() == (24 + 24 + 49) * entry  # two sources of ratio 2, one of ratio 1
    assert (parts["window"].first_position, parts["window"].num_records) == (49 - 28, 28)
    assert parts["window"].data.numel() == 12 * 28 * layout.window_record.num_bytes
    assert (parts["open_pair"].first_position, parts["open_pair"].num_records) == (48, 1)
    assert parts["open_pair"].data.numel() == 2 * 128 * 4


def test_an_import_of_another_length_is_refused(runner: StepRunner) -> None:
    parts = runner.model.export_kv(runner.caches, slot=2, block_ids=runner.block_ids(2, 7), num_tokens=7)
    with pytest.raises(AssertionError, match="8 tokens"):
        runner.model.import_kv(runner.caches, slot=8, block_ids=runner.block_ids(8, 8), num_tokens=8, parts=parts)
