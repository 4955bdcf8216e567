"""Several ranks with spread experts: same answers as one, ranks without work, parking and waking together."""

from __future__ import annotations

import random
import time

import pytest
from support.fake_model import VOCAB_SIZE
from support.processes import run_ranks
from support.rank_engines import (
    Answer,
    RunningEngine,
    admission,
    answer_all,
    build_fake_rank,
    make_request,
    run_decode,
    run_prefill,
)

from deepinfer.codec import unpack
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.errors import RankError
from deepinfer.protocol import Request
from deepinfer.runtime.rank_engine import RankEngine

WAIT_SECONDS = 60.0


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


def _second_groups(groups: ProcessGroups) -> ProcessGroups:
    return ProcessGroups.form(
        role="prefill",
        rank=groups.sync.rank,
        num_ranks=groups.sync.num_ranks,
        host=groups.store.host,
        port=groups.store.port,
        timeout_seconds=60.0,
    )


def _meet(groups: ProcessGroups, name: str) -> None:
    """Wait until every rank is here; a rank that has finished must go on helping the others until then."""
    deadline = time.monotonic() + WAIT_SECONDS
    groups.store.add(name, 1)
    while groups.store.add(name, 0) < groups.sync.num_ranks:
        assert time.monotonic() < deadline, f"not all ranks reached {name}"
        time.sleep(0.005)


def _wait_until_parked(engine: RankEngine) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not engine.status()["parked"]:
        assert time.monotonic() < deadline, engine.status()
        time.sleep(0.005)


def _answer_in_rounds(groups: ProcessGroups, rounds: list[list[list[Request]]]) -> dict[int, list[int]]:
    """Answer `rounds[i][rank]` in round i; all ranks park between the rounds."""
    rank = groups.sync.rank
    prefill = build_fake_rank("prefill", groups=_second_groups(groups))
    decode = build_fake_rank("decode", groups=groups)
    answers: dict[int, Answer] = {}
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        for wake_id, round_ in enumerate(rounds, start=1):
            done, _ = run_prefill(prefilling, round_[rank], wake_id=wake_id)
            answers |= {index: Answer(unpack(item.first_token_ids).tolist()) for index, (item, _) in done.items()}
            admitted = [
                (admission(request, done[request.index][0]), done[request.index][1]) for request in round_[rank]
            ]
            run_decode(decoding, admitted, answers, wake_id=wake_id)
            for engine in (prefill.engine, decode.engine):
                _wait_until_parked(engine)
        _meet(groups, "done")
    return {index: answer.token_ids for index, answer in answers.items()}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_group_gives_the_answers_of_one_rank(num_ranks: int) -> None:
    """In the first round only one rank has requests, in the second all but the last."""
    requests = _requests(8)
    first = [requests[:2], *[[] for _ in range(num_ranks - 1)]]
    second = [requests[2 + rank :: num_ranks - 1] for rank in range(num_ranks - 1)] + [[]]
    results = run_ranks(_answer_in_rounds, num_ranks, [first, second])
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
