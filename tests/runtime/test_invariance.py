"""Batch-invariant mode end to end: the bits of an answer's log-probabilities do not depend on anything around it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.answer_bits import Bits, answer_bits
from support.processes import RankPlace, run_processes
from support.rank_engines import make_request
from support.tiny_ranks import VOCAB_SIZE, build_tiny_rank

from deepinfer.errors import ConfigError
from deepinfer.protocol import Request

# below, at and above the kept suffix of 28 tokens; odd and even; 75 fills several blocks
LENGTHS = (1, 2, 17, 28, 29, 46, 75)
INVARIANT = "determinism.batch_invariant=true"


def watched(lengths: tuple[int, ...] = LENGTHS, *, num_tokens: int = 4) -> list[Request]:
    """The requests whose answers are compared: greedy and drawn, with three alternatives for each token.

    Every fourth also asks for its prompt's log-probabilities, so that it runs at full depth beside the others.
    """
    numbers = random.Random(1)
    return [
        make_request(
            place,
            [numbers.randrange(VOCAB_SIZE) for _ in range(length)],
            max_tokens=num_tokens + place,
            temperature=float(place % 3 > 0),
            logprobs=3,
            prompt_logprobs=1 if place % 4 == 2 else None,
        )
        for place, length in enumerate(lengths)
    ]


def company(count: int) -> list[Request]:
    """Other requests, short ones."""
    numbers = random.Random(2)
    return [
        make_request(
            1000 + place,
            [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 12))],
            max_tokens=numbers.randrange(1, 4),
            logprobs=0,
        )
        for place in range(count)
    ]


def answers(
    directory: Path, requests: list[Request], *settings: str, sizes: tuple[int, int] = (8, 8)
) -> dict[int, Bits]:
    """Answers of the watched requests among `requests`, from one prefill and one decode rank that run `sizes` each."""
    running = [f"prefill.max_running={sizes[0]}", f"decode.max_running={sizes[1]}"]
    ranks = [build_tiny_rank(role, directory, INVARIANT, *running, *settings) for role in ("prefill", "decode")]
    return _watched_only(answer_bits(*ranks, requests)[0])


def _watched_only(found: dict[int, Bits]) -> dict[int, Bits]:
    return {index: bits for index, bits in sorted(found.items()) if index < 1000}


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[int, Bits]:
    """One sequence at a time, prompts in one piece, each step's results read before the next."""
    return answers(directory, watched(), "scheduler.asynchronous=false", sizes=(1, 1))


@pytest.mark.parametrize(
    "count", [1, 7, pytest.param(63, marks=pytest.mark.slow), pytest.param(255, marks=pytest.mark.slow)]
)
def test_company_and_order(directory: Path, alone: dict[int, Bits], count: int) -> None:
    """P31, P32: alone and among up to 255 others, 64 and more live at once; log-probabilities to the bit."""
    requests = watched() + company(count)
    random.Random(count).shuffle(requests)
    size = min(64, len(requests))
    assert answers(directory, requests, sizes=(size, len(requests))) == alone


@pytest.mark.parametrize("max_tokens_per_step", [5, 64])
def test_chunks(directory: Path, alone: dict[int, Bits], max_tokens_per_step: int) -> None:
    requests = watched()[::-1]
    assert answers(directory, requests, f"prefill.max_tokens_per_step={max_tokens_per_step}") == alone


def test_drafts(directory: Path, alone: dict[int, Bits]) -> None:
    """`alone` drafts five tokens, as is the default."""
    assert answers(directory, watched(), "speculative.max_draft_tokens=0") == alone


def test_forced_preemption(directory: Path) -> None:
    """Cache for one longest sequence: what a preempted one has produced runs again with its prompt."""
    requests = watched((30, 31, 33, 34), num_tokens=17)
    settings = (INVARIANT, "model.max_model_len=144", "cache.block_size=2")
    with pytest.raises(ConfigError, match="bytes are needed") as refused:
        build_tiny_rank("decode", directory, *settings, "cache.memory_bytes=1")
    smallest = int(str(refused.value).split(": ")[1].split()[0])
    prefill = build_tiny_rank("prefill", directory, *settings)
    decode = build_tiny_rank("decode", directory, *settings, f"cache.memory_bytes={smallest}")
    found, num_preemptions = answer_bits(prefill, decode, requests)
    assert num_preemptions > 0
    assert found == answers(directory, requests, "scheduler.asynchronous=false", sizes=(1, 1))


def _answer_share(place: RankPlace, argument: tuple[str, list[list[Request]], str]) -> dict[int, Bits]:
    directory, shares, tables = Path(argument[0]), *argument[1:]
    ranks = [
        build_tiny_rank(role, directory, INVARIANT, f"{role}.ngram_tables={tables}", place=place)
        for role in ("prefill", "decode")
    ]
    found, num_preemptions = answer_bits(*ranks, shares[place.rank], place=place)
    assert num_preemptions == 0
    return found


@pytest.mark.parametrize(
    ("num_ranks", "tables"), [(2, "host"), (2, "sharded"), pytest.param(4, "sharded", marks=pytest.mark.slow)]
)
def test_ranks(directory: Path, alone: dict[int, Bits], num_ranks: int, tables: str) -> None:
    """Experts spread over ranks, n-gram tables mapped or spread as well; the last rank has no request of its own."""
    requests = watched() + company(3)
    shares = [requests[rank :: num_ranks - 1] for rank in range(num_ranks - 1)] + [[]]
    results = run_processes(_answer_share, num_ranks, (str(directory), shares, tables))
    assert _watched_only({index: bits for part in results for index, bits in part.items()}) == alone


def test_answers_tell_requests_apart(alone: dict[int, Bits]) -> None:
    """Equal answers prove nothing if the model always says the same."""
    assert len({bits.token_ids for bits in alone.values()}) == len(LENGTHS)
    assert len({bits.logprob_values[:16] for bits in alone.values()}) == len(LENGTHS)
    assert all(len(bits.prompt_logprobs) == 1 for bits in alone.values())
    assert [index for index, bits in alone.items() if bits.prompt_logprobs != {None}] == [2, 6]
