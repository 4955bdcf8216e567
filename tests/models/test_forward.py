"""One ragged forward pass: the bits of a row depend on its own sequence only, however the rows are cut into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.golden_case import golden_model
from support.step_runner import Chunk, StepRunner
from torch import Tensor

W16 = Path(__file__).parents[1] / "golden" / "w16"
WINDOW, RING = 16, 28

pytestmark = pytest.mark.parametrize("mode", ["fp32_noq", "ref"])


def make_tokens(seed: int, length: int) -> Tensor:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def runner(mode: str) -> StepRunner:
    return StepRunner(golden_model(W16, mode), max_tokens=128)


def test_chunks_do_not_change_bits(runner: StepRunner) -> None:
    # one chunk longer than the ring; chunks that end on open pairs; single tokens at both ends
    tokens = make_tokens(1, 75)
    whole = runner.run_in_chunks(1, tokens, [75])
    for slot, sizes in ((2, [1, 1, 2, 29, 7, 31, 1, 3]), (3, [37, 38])):
        assert torch.equal(runner.run_in_chunks(slot, tokens, sizes), whole)


def test_token_by_token_gives_the_bits_of_one_chunk(runner: StepRunner) -> None:
    tokens = make_tokens(2, 23)
    whole = runner.run_in_chunks(1, tokens, [23])
    assert torch.equal(runner.run_in_chunks(2, tokens, [1] * 23), whole)


def test_other_sequences_do_not_change_bits(runner: StepRunner) -> None:
    first, second, third = make_tokens(3, 50), make_tokens(4, 33), make_tokens(5, 9)
    alone = [runner.run_in_chunks(1, tokens, [len(tokens)]) for tokens in (first, second, third)]
    mixed: dict[int, list[Tensor]] = {1: [], 2: [], 3: []}
    steps = (
        (Chunk(2, 0, second[:20]), Chunk(1, 0, first[:1])),
        (Chunk(1, 1, first[1:49]), Chunk(3, 0, third[:8]), Chunk(2, 20, second[20:21])),
        (Chunk(3, 8, third[8:]), Chunk(2, 21, second[21:]), Chunk(1, 49, first[49:])),
    )
    for step in steps:
        for chunk, logits in zip(step, runner.run(*step), strict=True):
            mixed[chunk.slot].append(logits)
    for slot, logits in enumerate(alone, start=1):
        assert torch.equal(torch.cat(mixed[slot]), logits)


def test_padding_rows_are_inert(runner: StepRunner) -> None:
    tokens = make_tokens(6, 35)
    plain = runner.run_in_chunks(1, tokens, [34, 1])
    (prefill,) = runner.run(Chunk(2, 0, tokens[:34]), num_padding=5)
    assert runner.run(num_padding=7) == ()
    (decode,) = runner.run(Chunk(2, 34, tokens[34:]), num_padding=31)
    assert torch.equal(torch.cat((prefill, decode)), plain)


def test_an_empty_step_runs(runner: StepRunner) -> None:
    assert runner.run(Chunk(1, 0, make_tokens(7, 0)))[0].shape == (0, 512)


def test_undone_tokens_leave_no_trace(runner: StepRunner) -> None:
    # up to twelve wrong drafts are written, then the sequence goes on before them
    tokens, wrong = make_tokens(8, 60), make_tokens(9, 12)
    plain = runner.run_in_chunks(1, tokens, [47, 13])
    kept = runner.run_in_chunks(2, tokens[:47], [47])
    for start, count in ((41, 6), (35, 12), (46, 1)):
        runner.run(Chunk(2, start, wrong[:count]))
        redone = runner.run_in_chunks(2, tokens[start:47], [47 - start], start=start)
        assert torch.equal(redone, kept[start:])
    assert torch.equal(runner.run_in_chunks(2, tokens[47:], [13], start=47), plain[47:])


def test_a_slot_forgets_its_former_sequence(runner: StepRunner) -> None:
    tokens = make_tokens(10, 20)
    plain = runner.run_in_chunks(1, tokens, [20])
    runner.run_in_chunks(2, make_tokens(11, 70), [70])
    assert torch.equal(runner.run_in_chunks(2, tokens, [9, 11]), plain)


def test_equal_index_scores_are_broken_alike(runner: StepRunner) -> None:
    # one token repeated: entries tie often, and every cut must give the same bits
    tokens = torch.full((70,), 17)
    whole = runner.run_in_chunks(1, tokens, [70])
    assert torch.isfinite(whole).all()
    assert torch.equal(runner.run_in_chunks(2, tokens, [33, 1, 36]), whole)
