"""Several ranks with spread experts: same answers as one, ranks without work, parking and waking together."""

from __future__ import annotations

import random
import time

import pytest
from support.fake_model import VOCAB_SIZE
from support.processes import RankPlace, run_processes, run_ranks
from support.rank_engines import (
    RunningEngine,
    answer_all,
    answer_rounds,
    build_fake_rank,
    make_request,
    run_prefill,
)

from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.errors import RankError
from deepinfer.protocol import Request


def _requests(count: int) -> list[Request]:
    numbers = random.Random(6)
    return [
        make_request(
            place,
            [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 20))],
            max_tokens=numbers.randrange(2, 15),
        )
        for place in range(count)
    ]


def _answer_in_rounds(place: RankPlace, rounds: list[list[list[Request]]]) -> dict[int, list[int]]:
    """Answer `rounds[i][rank]` in round i; all ranks park between the rounds."""
    prefill = build_fake_rank("prefill", groups=place.form_groups("prefill"))
    decode = build_fake_rank("decode", groups=place.form_groups("decode"))
    return answer_rounds(place, prefill.engine, decode.engine, [round_[place.rank] for round_ in rounds])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_group_gives_the_answers_of_one_rank(num_ranks: int) -> None:
    """In the first round only one rank has requests, in the second all but the last."""
    requests = _requests(8)
    first = [requests[:2], *[[] for _ in range(num_ranks - 1)]]
    second = [requests[2 + rank :: num_ranks - 1] for rank in range(num_ranks - 1)] + [[]]
    results = run_processes(_answer_in_rounds, num_ranks, [first, second])
    merged = {index: tokens for part in results for index, tokens in part.items()}
    alone = answer_all(build_fake_rank("prefill").engine, build_fake_rank("decode").engine, requests)
    assert merged == {index: answer.token_ids for index, answer in alone.items()}


def _lose_a_rank(groups: ProcessGroups, requests: list[Request]) -> str:
    if groups.sync.rank == 1:
        time.sleep(4.0)  # a rank that never comes to the first agreement
        return "absent"
    prefill = build_fake_rank("prefill", groups=groups)
    try:
        with RunningEngine(prefill.engine) as running:
            run_prefill(running, requests, wake_id=1)
    except RankError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_ends_the_loop_with_an_error() -> None:
    results = run_ranks(_lose_a_rank, 2, _requests(1), timeout_seconds=1.5)
    assert results[0].startswith("prefill rank 0: step 0 broke: "), results[0]
    assert "all-gather of 2 ranks failed" in results[0]
