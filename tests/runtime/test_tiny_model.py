"""Rank engines with the tiny checkpoint: the loop runs the real model, and nothing about batching shows in answers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.rank_engines import Answer, answer_all
from support.tiny_ranks import build_tiny_rank, tiny_requests, with_sampling

from deepinfer.protocol import FinishCode
from deepinfer.tokenizer import Tokenizer

LENGTHS = [1, 2, 17, 49, 90]


def _answers(directory: Path, lengths: list[int], *settings: str, **sampling: object) -> dict[int, Answer]:
    ranks = [build_tiny_rank(role, directory, *settings) for role in ("prefill", "decode")]
    answers = answer_all(ranks[0], ranks[1], tiny_requests(lengths, **sampling))
    assert all(answer.failure is None and answer.finish for answer in answers.values()), answers
    return answers


def _tokens(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {index: answer.token_ids for index, answer in answers.items()}


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[int, list[int]]:
    """One sequence at a time, prompts in one piece, each step's results read before the next."""
    settings = ("scheduler.asynchronous=false", "prefill.max_running=1", "decode.max_running=1")
    return _tokens(_answers(directory, LENGTHS, *settings))


@pytest.mark.parametrize("max_tokens_per_step", [7, 64, 2048])
def test_asynchronous_batches_give_the_tokens_of_synchronous_single_sequences(
    directory: Path, expected: dict[int, list[int]], max_tokens_per_step: int
) -> None:
    answers = _answers(directory, LENGTHS, f"prefill.max_tokens_per_step={max_tokens_per_step}")
    assert _tokens(answers) == expected


def test_prompts_run_token_by_token(directory: Path, expected: dict[int, list[int]]) -> None:
    answers = _answers(directory, LENGTHS[:3], "prefill.max_tokens_per_step=1")
    assert _tokens(answers) == {index: expected[index] for index in answers}


def test_plan_n_plus_1_is_launched_before_result_n_is_read(directory: Path) -> None:
    events: list[tuple[str, int]] = []
    prefill = build_tiny_rank("prefill", directory)
    decode = build_tiny_rank("decode", directory, observe_step=lambda event, step: events.append((event, step)))
    answers = answer_all(prefill, decode, tiny_requests([9, 20], max_tokens=12))
    assert [len(answer.token_ids) for answer in answers.values()] == [12, 12]
    place = {event: number for number, event in enumerate(events)}
    steps = sorted(step for event, step in events if event == "launched")
    assert len(steps) == 11
    for step, following in itertools.pairwise(steps):
        assert place["launched", following] < place["read", step]


def test_answers_differ_between_prompts_and_seeds(expected: dict[int, list[int]]) -> None:
    """Equal answers prove nothing if the model always says the same."""
    assert len({tuple(tokens[:6]) for tokens in expected.values()}) == len(expected)
    assert all(len(set(tokens)) > 2 for tokens in expected.values())


def _one(directory: Path, **sampling: object) -> Answer:
    ranks = [build_tiny_rank(role, directory) for role in ("prefill", "decode")]
    (request,) = tiny_requests([20], max_tokens=12)
    return answer_all(ranks[0], ranks[1], [with_sampling(request, **sampling)])[0]


def test_stop_strings_and_bad_words_are_read_with_the_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    free = _one(directory)
    plain = [place for place in range(3, 12) if tokenizer.token_text(free.token_ids[place]).isascii()]
    place = next(p for p in plain if free.token_ids[p] not in free.token_ids[:p])
    word = tokenizer.token_text(free.token_ids[place])
    stopped = _one(directory, stop=(word,))
    assert stopped.finish is FinishCode.STOP
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert word in tokenizer.decode(stopped.token_ids)
    without = _one(directory, bad_words=(word,))
    assert without.token_ids[:place] == free.token_ids[:place]
    assert without.token_ids[place] != free.token_ids[place]
