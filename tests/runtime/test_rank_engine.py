"""One prefill and one decode rank with the fake model: same answers however the work is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.fake_model import VOCAB_SIZE, FakeModel
from support.rank_engines import Answer, answer_all, build_fake_rank, make_request

from deepinfer.protocol import FinishCode, Request


def _requests(count: int = 10, **sampling: Any) -> list[Request]:
    numbers = random.Random(5)
    return [
        make_request(
            4 * place,
            [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.choice([1, 2, 3, 9, 30]))],
            max_tokens=numbers.randrange(1, 25),
            **sampling,
        )
        for place in range(count)
    ]


def _tokens(answers: dict[int, Answer]) -> dict[int, list[int]]:
    assert all(answer.failure is None and answer.finish for answer in answers.values()), answers
    return {index: answer.token_ids for index, answer in answers.items()}


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Each request alone, synchronously, its prompt in one piece."""
    tokens: dict[int, list[int]] = {}
    for request in _requests():
        ranks = [build_fake_rank(role, asynchronous=False, max_running=1) for role in ("prefill", "decode")]
        tokens |= _tokens(answer_all(ranks[0].engine, ranks[1].engine, [request]))
    return tokens


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("max_tokens_per_step", [1, 7, 64])
def test_batches_and_chunks_give_the_tokens_of_each_request_alone(
    expected: dict[int, list[int]], asynchronous: bool, max_tokens_per_step: int
) -> None:
    prefill = build_fake_rank("prefill", max_tokens_per_step=max_tokens_per_step, asynchronous=asynchronous)
    decode = build_fake_rank("decode", asynchronous=asynchronous)
    assert _tokens(answer_all(prefill.engine, decode.engine, _requests())) == expected
    assert all(
        len(tokens) == request.sampling.max_tokens
        for tokens, request in zip(expected.values(), _requests(), strict=True)
    )


def test_preempted_sequences_come_to_the_same_tokens(expected: dict[int, list[int]]) -> None:
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode", num_blocks=1 + 16, max_model_len=64)
    answers = answer_all(prefill.engine, decode.engine, _requests())
    assert sum(answer.num_preemptions for answer in answers.values()) > 0
    assert _tokens(answers) == expected
    assert decode.recorder.get("deepinfer_requests_preempted") > 0


def test_step_n_plus_1_is_launched_before_the_result_of_n_is_read() -> None:
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode", model=FakeModel(step_seconds=0.005))
    answer_all(prefill.engine, decode.engine, [make_request(0, [1, 2, 3], max_tokens=20)])
    launched = {step: place for place, (event, step) in enumerate(decode.events) if event == "launched"}
    read = {step: place for place, (event, step) in enumerate(decode.events) if event == "read"}
    assert len(launched) == 19  # the prefill gave the first token, and the last step is known to be the last
    assert launched.keys() == read.keys()
    assert all(
        launched[step + 1] < read[step] < launched.get(step + 2, read[step] + 1)
        for step in read
        if step + 1 in launched
    )


def test_a_synchronous_loop_reads_each_result_before_the_next_launch() -> None:
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode", asynchronous=False)
    answer_all(prefill.engine, decode.engine, [make_request(0, [1, 2, 3], max_tokens=6)])
    kinds = [event for event, _ in decode.events]
    assert kinds == ["launched", "read"] * 5


def test_a_sequence_that_stops_by_surprise_costs_one_row() -> None:
    request = make_request(0, [1, 2, 3], max_tokens=20)
    ranks = [build_fake_rank(role) for role in ("prefill", "decode")]
    token_ids = _tokens(answer_all(ranks[0].engine, ranks[1].engine, [request]))[0]
    stop = next(place for place in range(3, 20) if token_ids[place] not in token_ids[:place])
    request = make_request(0, [1, 2, 3], max_tokens=20, stop_token_ids=(token_ids[stop],))
    ranks = [build_fake_rank(role) for role in ("prefill", "decode")]
    answer = answer_all(ranks[0].engine, ranks[1].engine, [request])[0]
    assert (answer.token_ids, answer.finish) == (token_ids[: stop + 1], FinishCode.STOP)
    assert sum(ranks[1].model.row_counts) == stop + 1  # `stop` tokens came from decode steps, and one row was wasted
