"""The sampler as a whole: order of stages, failures, independence of rows, and the distribution that it draws from."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.token_rows import admit, rows_of
from torch import Tensor

from deepinfer.protocol import SamplingParams
from deepinfer.sampling.sampler import Sampled, sample
from deepinfer.sampling.state import SamplingState
from deepinfer.scheduler.sampling_params import derived_seed
from tests.sampling.sampling_case import EOS, MAX_LEN, Batch, columns_of

NUM_POSITIONS = 20_000
PROBABILITIES = torch.tensor([0.05, 0.2, 0.01, 0.3, 0.14, 0.1, 0.15, 0.05])


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    batch = Batch()
    batch.admit(1, temperature=0.0)
    assert batch.one([0, 3, 3, 1, 0, 0, 0, 0, 0, 3], slot=1, position=1) == 1


def test_greedy_ignores_truncation_and_seed() -> None:
    batch = Batch()
    batch.admit(1, temperature=0.0, top_k=1, top_p=0.1, min_p=0.5, seq_seed=99)
    assert not batch.state.truncating
    assert batch.one([0, 1, 2, 3, 9, 3, 2, 1, 0, 0], slot=1, position=1) == 4


def test_logits_are_left_as_they_are() -> None:
    batch = Batch()
    batch.admit(1, temperature=0.5, top_k=2, repetition_penalty=3.0, logit_bias={4: 5.0}, logprobs=3)
    batch.admit(2, temperature=0.5, top_p=0.2)
    logits = torch.randn(2, 10)
    before = logits.clone()
    batch.sample(logits, [1, 2], [1, 1])
    assert torch.equal(logits, before)


def test_history_ends_before_the_position() -> None:
    batch = Batch()
    batch.admit(1, temperature=0.0, prompt=[0], output=[5, 6], frequency_penalty=2.0)
    logits = torch.tensor([[0, 0, 0, 0, 0, 3, 2, 1.5, 0, 0]]).repeat(3, 1)
    rows = batch.sample(logits, [1, 1, 1], [1, 2, 3])  # one verification pass over drafts 5 and 6
    assert rows.token_ids.tolist() == [5, 6, 7]


def test_a_row_without_any_allowed_token_falls_back_to_its_raw_logits() -> None:
    batch = Batch()
    batch.admit(1, temperature=0.0, allowed_token_ids=(EOS,), min_tokens=5)
    batch.admit(2, temperature=1.0, allowed_token_ids=(3,), top_p=0.5)
    batch.admit(2, temperature=1.0, allowed_token_ids=(3,), bad_words=((3,),))
    batch.admit(3, temperature=0.0)
    sampled = batch.sample(torch.randn(3, 10), [1, 2, 3], [1, 1, 1])
    assert sampled.token_ids.tolist()[:2] == [EOS, 3]
    assert sampled.fell_back.tolist() == [True, True, False]
    assert not sampled.failed.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("damage", ["one NaN", "all NaN", "all -inf", "+inf", "allowed -inf"])
def test_unusable_rows_fail_alone(temperature: float, damage: str) -> None:
    """P34: no token is drawn from such a row, and its neighbours stay the same to the bit."""
    batch = Batch(vocab_size=40)
    for slot in (1, 2, 3):
        batch.admit(slot, temperature=temperature, top_p=0.9, logprobs=2, allowed_token_ids=(4, 5, 6), seq_seed=slot)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    healthy = batch.sample(logits, [1, 2, 3], [1, 1, 1])
    broken = logits.clone()
    match damage:
        case "one NaN":
            broken[1, 30] = math.nan
        case "all NaN":
            broken[1] = math.nan
        case "all -inf":
            broken[1] = -math.inf
        case "+inf":
            broken[1, 30] = math.inf
        case _:
            broken[1, 4:7] = -math.inf
    sampled = batch.sample(broken, [1, 2, 3], [1, 1, 1])
    assert sampled.failed.tolist() == [False, True, False]
    assert not sampled.fell_back.any()
    assert sampled.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()
    found, wanted = columns_of(sampled), columns_of(healthy)
    assert None not in wanted
    assert [found[0], found[2]] == [wanted[0], wanted[2]]
    assert int(sampled.token_ids[1]) == 0


def test_padding_rows_cost_no_draw() -> None:
    batch = Batch()
    batch.admit(1, temperature=1.0)
    sampled = batch.sample(torch.zeros(3, 10), [0, 1, 0], [0, 1, 0])
    assert sampled.token_ids[[0, 2]].tolist() == [0, 0]


def test_a_slot_keeps_nothing_of_its_last_sequence() -> None:
    batch, fresh = Batch(), Batch()
    batch.admit(2, temperature=0.7, top_k=2, top_p=0.5, min_p=0.1, logprobs=3, min_tokens=4, presence_penalty=1.0)
    for one in (batch, fresh):
        one.admit(2, temperature=0.0)
    for name, column in vars(fresh.state).items():
        kept = getattr(batch.state, name)
        assert torch.equal(kept, column) if isinstance(column, Tensor) else kept == column, name


def _mixed_batch() -> tuple[Batch, Tensor, list[int], list[int], list[int]]:
    """Twelve rows of six very different sequences, two of them with several rows."""
    batch = Batch(num_slots=10, vocab_size=317)
    generator = torch.Generator().manual_seed(11)
    batch.admit(1, temperature=0.0, logprobs=5)
    batch.admit(2, temperature=1.3, seq_seed=5)
    batch.admit(3, temperature=0.8, top_p=0.7, seq_seed=6, logprobs=-1)
    batch.admit(4, temperature=0.9, top_k=9, min_p=0.01, top_p=0.95, seq_seed=7)
    batch.admit(5, temperature=1.0, repetition_penalty=1.7, presence_penalty=0.4, output=[5] * 9, logprobs=0)
    batch.admit(6, temperature=0.0, allowed_token_ids=(7, 8, 9), bad_words=((7,),), output=[8] * 9)
    slots = [1, 2, 3, 4, 4, 4, 5, 5, 5, 6, 3, 2]
    positions = [1, 4, 9, 3, 4, 5, 2, 3, 4, 8, 10, 5]
    samples = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    return batch, torch.randn(12, 317, generator=generator) * 3, slots, positions, samples


def _row(sampled: Sampled, row: int) -> tuple[int, object, bool, bool]:
    return (
        int(sampled.token_ids[row]),
        columns_of(sampled)[row],
        bool(sampled.failed[row]),
        sampled.fell_back is not None and bool(sampled.fell_back[row]),
    )


def test_a_row_alone_is_the_row_among_others() -> None:
    batch, logits, slots, positions, samples = _mixed_batch()
    together = batch.sample(logits, slots, positions, samples)
    for row in range(12):
        alone = batch.sample(logits[row : row + 1], [slots[row]], [positions[row]], [samples[row]])
        assert _row(alone, 0) == _row(together, row)


def test_the_order_of_rows_changes_nothing() -> None:
    batch, logits, slots, positions, samples = _mixed_batch()
    together = batch.sample(logits, slots, positions, samples)
    for seed in range(5):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
        shuffled = batch.sample(
            logits[order], [slots[i] for i in order], [positions[i] for i in order], [samples[i] for i in order]
        )
        for place, row in enumerate(order):
            assert _row(shuffled, place) == _row(together, row)


def test_the_slot_of_a_sequence_changes_nothing() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    drawn = set()
    for slot in (1, 4, 7):
        batch = Batch(vocab_size=50)
        batch.admit(slot, temperature=2.0, top_p=0.99)
        drawn.add(tuple(batch.one(logits[0], slot=slot, position=position) for position in range(1, 30)))
    assert len(drawn) == 1


def _draws(*, samples: int = 0, seed: int = 123, **fields: object) -> Tensor:
    """Counts [8] of the tokens drawn at NUM_POSITIONS positions from PROBABILITIES."""
    state = SamplingState(2, 8, torch.device("cpu"), eos_token_id=EOS)
    params = SamplingParams(**({"seq_seed": seed} | fields))  # type: ignore[arg-type]
    admit(state, 1, params, num_prompt_tokens=0)
    table = torch.zeros(2, MAX_LEN, dtype=torch.int32)
    seeds = [derived_seed(seed, samples)] * NUM_POSITIONS
    rows = rows_of([1] * NUM_POSITIONS, seeds, range(NUM_POSITIONS), table)
    if state.truncating:
        rows = dataclasses.replace(rows, owners=(1,), by_owner=torch.arange(NUM_POSITIONS)[None])
    sampled = sample(PROBABILITIES.log().repeat(NUM_POSITIONS, 1), rows, state)
    return torch.bincount(sampled.token_ids, minlength=8)


def _chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Against a 0.1 % chance limit of 24.3 at 7 degrees of freedom (18.5 at 4)."""
    support = probabilities > 0
    assert int(counts[~support].sum()) == 0
    expected = probabilities[support] / probabilities.sum() * NUM_POSITIONS
    return float(((counts[support] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 42, 123, 2**63 - 1])
def test_draws_follow_the_distribution(seed: int) -> None:
    assert _chi_square(_draws(seed=seed), PROBABILITIES) < 24.3


@pytest.mark.parametrize("sample_number", [1, 2, 5])
def test_draws_of_further_samples_follow_it_too(sample_number: int) -> None:
    assert _chi_square(_draws(samples=sample_number), PROBABILITIES) < 24.3


def test_temperature_sharpens_the_distribution() -> None:
    assert _chi_square(_draws(temperature=0.5), PROBABILITIES**2) < 24.3


@pytest.mark.parametrize(
    ("fields", "support"),
    [
        ({"top_k": 3}, [1, 3, 6]),
        ({"top_k": 7}, [0, 1, 3, 4, 5, 6, 7]),  # two ids tie for the seventh place: both stay
        ({"top_p": 0.6}, [1, 3, 6]),
        ({"top_p": 0.66}, [1, 3, 4, 6]),
        ({"min_p": 0.49}, [1, 3, 6]),
        ({"min_p": 0.6, "top_k": 4, "top_p": 0.99}, [1, 3]),
    ],
)
def test_truncated_draws_follow_the_rest(fields: dict[str, float], support: list[int]) -> None:
    rest = torch.zeros(8)
    rest[support] = PROBABILITIES[support]
    counts = _draws(**fields)
    assert (counts[support] > 0).all()
    assert _chi_square(counts, rest) < 24.3


def test_samples_of_a_request_draw_with_their_own_seeds() -> None:
    batch = Batch(vocab_size=200)
    batch.admit(1, seq_seed=42)
    logits = torch.zeros(40, 200)
    positions = list(range(1, 21)) * 2
    rows = batch.sample(logits, [1] * 40, positions, [0] * 20 + [3] * 20).token_ids
    assert rows[:20].tolist() != rows[20:].tolist()
    other = Batch(vocab_size=200)
    other.admit(1, seq_seed=derived_seed(42, 3))
    assert other.sample(logits[:20], [1] * 20, positions[:20]).token_ids.tolist() == rows[20:].tolist()


def test_positions_are_independent_draws() -> None:
    """Pairs of neighbouring positions: 49 cells, 99.9 % limit of chi-square at 48 degrees of freedom is 84.0."""
    batch = Batch(vocab_size=7)
    batch.admit(1)
    rows = batch.sample(torch.zeros(NUM_POSITIONS, 7), [1] * NUM_POSITIONS, list(range(NUM_POSITIONS))).token_ids
    pairs = torch.bincount(rows[0::2] * 7 + rows[1::2], minlength=49).double()
    expected = NUM_POSITIONS / 2 / 49
    assert float(((pairs - expected) ** 2 / expected).sum()) < 84.0
