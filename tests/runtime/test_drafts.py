"""Drafts through rank engines with the fake model: nothing about them shows in answers but the counts.

The fake model accepts what an oracle drafts, so every length of an accepted run occurs at every place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.fake_model import RING, VOCAB_SIZE, FakeModel
from support.oracle import Accepted, OracleDrafter
from support.rank_engines import Answer, answer_all, build_fake_rank, make_request

from deepinfer.codec import unpack, unpack_floats
from deepinfer.protocol import FinishCode, Request
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.speculative.cost_table import CostTable
from deepinfer.speculative.drafter import Anchors, Drafts

MAX_DRAFTS = 5


def _capture(work: Callable[[], Any]) -> Callable[[], Any]:
    return work


def _requests(count: int, **sampling: Any) -> list[Request]:
    numbers = random.Random(3)
    return [
        make_request(
            place,
            [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 20))],
            **{
                "max_tokens": numbers.randrange(2, 40),
                "temperature": 0.0 if place % 3 == 0 else 1.0,
                "logprobs": 2 if place % 2 else None,
            }
            | sampling,
        )
        for place in range(count)
    ]


def _plain(requests: list[Request], **rank: Any) -> dict[int, Answer]:
    return answer_all(build_fake_rank("prefill").engine, build_fake_rank("decode", **rank).engine, requests)


def _whole(request: Request, answer: Answer) -> list[int]:
    return unpack(request.prompt_token_ids).tolist() + answer.token_ids


def _drafted(
    requests: list[Request],
    plain: dict[int, Answer],
    *,
    hit_rate: float,
    max_drafts: int = MAX_DRAFTS,
    log: Accepted | None = None,
    sequences: list[list[int]] | None = None,
    **rank: Any,
) -> dict[int, Answer]:
    """Answer with an oracle that knows `plain`, or `sequences`."""
    known = sequences or [_whole(request, plain[request.index]) for request in requests]
    make_drafter: Callable[[SlotTable], OracleDrafter] = partial(
        OracleDrafter, sequences=known, hit_rate=hit_rate, vocab_size=VOCAB_SIZE, log=log or Accepted()
    )
    decode = build_fake_rank("decode", max_drafts=max_drafts, make_drafter=make_drafter, **rank)
    return answer_all(build_fake_rank("prefill").engine, decode.engine, requests)


def _visible(answers: dict[int, Answer]) -> dict[int, tuple[Any, ...]]:
    """Everything of an answer but the counts, log-probabilities as bytes."""
    return {
        index: (
            answer.token_ids,
            answer.finish,
            b"".join(part.token_ids for part in answer.logprobs),
            b"".join(part.values for part in answer.logprobs),
        )
        for index, answer in answers.items()
    }


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("hit_rate", [0.0, 0.75, 1.0])
def test_answers_are_those_without_drafts(hit_rate: float, asynchronous: bool) -> None:
    """P29: a seed means the same at any depth, so a second run under the same one does too."""
    requests = _requests(20)
    plain = _plain(requests)
    drafted = _drafted(requests, plain, hit_rate=hit_rate, asynchronous=asynchronous)
    assert _visible(drafted) == _visible(plain)
    assert len({tuple(answer.token_ids) for answer in plain.values()}) == len(plain)


@pytest.mark.parametrize("max_drafts", [1, 2, 3])
def test_any_number_of_drafts_gives_the_same_answers(max_drafts: int) -> None:
    requests = _requests(8)
    plain = _plain(requests)
    assert _visible(_drafted(requests, plain, hit_rate=0.75, max_drafts=max_drafts)) == _visible(plain)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_lengths_that_vary_with_confidence_change_nothing(asynchronous: bool) -> None:
    """Rows are dear, so budgets are cut and shared out by log-odds."""
    requests = _requests(12, max_tokens=30)
    plain = _plain(requests)
    fixed = _drafted(requests, plain, hit_rate=0.75)
    costs = CostTable((1, 8), (0, 5), ((1.0, 1.6), (1.0, 8.0)), (1.0, 1.0))
    varied = _drafted(requests, plain, hit_rate=0.75, asynchronous=asynchronous, costs=costs)
    assert _visible(varied) == _visible(plain)
    num_fixed, num_varied = (sum(answer.num_drafted for answer in answers.values()) for answers in (fixed, varied))
    assert 0 < num_varied < 0.8 * num_fixed


class _Fickle(OracleDrafter):
    """Wrong in the first 80 places of a sequence, right behind them."""

    num_calls = 0

    def draft(self, anchors: Anchors) -> Drafts:
        type(self).num_calls += 1
        return super().draft(anchors)

    def _tell(self, number: int, place: int, known: list[int]) -> int:
        truth = super()._tell(number, place, known)
        return truth if place > 80 else (truth + 1) % VOCAB_SIZE


@pytest.mark.parametrize("capture", [None, _capture])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafting_rests_while_it_does_not_pay_and_goes_on_when_it_does(capture: Any, asynchronous: bool) -> None:
    """P28: answers are the same; wrong drafts soon end, and the right ones behind them are found by a later trial."""

    class Drafter(_Fickle):
        capturable = capture is not None

    requests = _requests(8, max_tokens=230, ignore_eos=True)
    plain = _plain(requests, num_blocks=600)
    known = [_whole(request, plain[request.index]) for request in requests]
    costs = CostTable((1, 8), (0, 5), ((1.02, 1.05),) * 2, (1.0, 1.0))
    log = Accepted()
    make_drafter = partial(Drafter, sequences=known, hit_rate=1.0, vocab_size=VOCAB_SIZE, log=log)
    decode = build_fake_rank(
        "decode",
        max_drafts=MAX_DRAFTS,
        make_drafter=make_drafter,
        asynchronous=asynchronous,
        costs=costs,
        capture=capture,
        num_blocks=600,
    )
    drafted = answer_all(build_fake_rank("prefill").engine, decode.engine, requests)
    assert _visible(drafted) == _visible(plain)
    num_steps = sum(event == "launched" for event, _ in decode.events)
    assert Drafter.num_calls < 0.7 * num_steps
    assert sum(answer.num_accepted for answer in drafted.values()) > 0.3 * 8 * 150


def test_runs_of_every_length_are_accepted_at_every_place() -> None:
    """Lengths 0 .. 5 at even and odd positions and at every place of the model's ring."""
    requests = _requests(24, max_tokens=100, ignore_eos=True, logprobs=None)
    plain, log = _plain(requests), Accepted()
    drafted = _drafted(requests, plain, hit_rate=0.75, log=log)
    assert _visible(drafted) == _visible(plain)
    for histogram in (log.histogram(lambda position: position % 2), log.histogram(lambda position: position % RING)):
        assert all(set(counts) == set(range(MAX_DRAFTS + 1)) for counts in histogram.values()), histogram
    assert log.committed_per_pass > 2.5


def test_drafted_and_accepted_tokens_are_counted() -> None:
    """With an oracle that is always right every pass takes six tokens, but the last one, which takes what is left."""
    (request,) = requests = _requests(1, max_tokens=1 + 1 + 6 * 3 + 4, ignore_eos=True)
    plain = _plain(requests)
    answer = _drafted(requests, plain, hit_rate=1.0)[request.index]
    # One token from prefill, one from the pass before there are drafts, three whole passes, then three drafts fit.
    assert (answer.num_drafted, answer.num_accepted) == (5 * 3 + 3, 5 * 3 + 3)
    wrong = _drafted(requests, plain, hit_rate=0.0)[request.index]
    # 22 passes have room for five drafts until the limit is near; nothing is accepted.
    assert wrong.num_accepted == 0
    assert wrong.num_drafted == sum(min(5, left) for left in range(22))


def test_a_stop_id_inside_an_accepted_run_ends_there_and_what_follows_is_not_counted() -> None:
    (request,) = _requests(1, max_tokens=30, ignore_eos=True)
    token_ids = _plain([request])[0].token_ids
    for place in range(2, 14):
        if token_ids[place] in token_ids[:place]:
            continue
        (stopping,) = _requests(1, max_tokens=30, ignore_eos=True, stop_token_ids=(token_ids[place],))
        sequences = [unpack(request.prompt_token_ids).tolist() + token_ids]
        answer = _drafted([stopping], {}, hit_rate=1.0, sequences=sequences)[0]
        assert (answer.token_ids, answer.finish) == (token_ids[: place + 1], FinishCode.STOP)
        num_passes, last = divmod(place - 2, 6)  # tokens 0 and 1 come without drafts
        assert answer.num_accepted == num_passes * 5 + min(last + 1, 5)


@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_the_token_limit_holds_wherever_it_cuts_a_run(max_tokens: int) -> None:
    requests = _requests(1, max_tokens=max_tokens, ignore_eos=True)
    (whole,) = _requests(1, max_tokens=40, ignore_eos=True)
    sequences = [_whole(whole, _plain([whole])[0])]
    answer = _drafted(requests, {}, hit_rate=1.0, sequences=sequences)[0]
    num_prompt = requests[0].num_prompt_tokens
    assert answer.token_ids == sequences[0][num_prompt : num_prompt + max_tokens]
    assert answer.finish is FinishCode.LENGTH


@pytest.mark.parametrize("num_free", range(1, 15))
def test_the_context_limit_holds_wherever_it_cuts_a_run(num_free: int) -> None:
    """The last rows of a sequence would lie behind its last block, and behind the token table."""
    (request,) = _requests(1, max_tokens=200, ignore_eos=True)
    max_model_len = request.num_prompt_tokens + num_free
    plain = answer_all(
        build_fake_rank("prefill", max_model_len=max_model_len).engine,
        build_fake_rank("decode", max_model_len=max_model_len, tokens_per_block=2).engine,
        [request],
    )
    log = Accepted()
    known = [_whole(request, plain[0]) + [1] * 10]
    decode = build_fake_rank(
        "decode",
        max_model_len=max_model_len,
        tokens_per_block=2,
        max_drafts=MAX_DRAFTS,
        make_drafter=partial(OracleDrafter, sequences=known, hit_rate=1.0, vocab_size=VOCAB_SIZE, log=log),
    )
    drafted = answer_all(build_fake_rank("prefill", max_model_len=max_model_len).engine, decode.engine, [request])
    assert _visible(drafted) == _visible(plain)
    assert len(plain[0].token_ids) == num_free


@pytest.mark.parametrize("hit_rate", [0.75, 1.0])
def test_preempted_sequences_come_to_the_same_answers(hit_rate: float) -> None:
    requests = _requests(8, max_tokens=40, ignore_eos=True, logprobs=None)
    plain = _plain(requests)
    drafted = _drafted(requests, plain, hit_rate=hit_rate, num_blocks=60)
    assert sum(answer.num_preemptions for answer in drafted.values()) > 0
    assert _visible(drafted) == _visible(plain)


def test_bad_numbers_behind_a_rejected_draft_harm_nobody() -> None:
    """The model answers NaN behind one token, which is drafted, wrongly, again and again."""
    requests = _requests(6, max_tokens=25, ignore_eos=True)
    plain = _plain(requests)
    used = {token for request in requests for token in _whole(request, plain[request.index])}
    poison = next(token for token in range(VOCAB_SIZE) if token not in used)

    class Poisoned(OracleDrafter):
        def _tell(self, number: int, place: int, known: list[int]) -> int:
            return super()._tell(number, place, known) if place % 3 else poison

    known = [_whole(request, plain[request.index]) for request in requests]
    make_drafter = partial(Poisoned, sequences=known, hit_rate=1.0, vocab_size=VOCAB_SIZE, log=Accepted())
    decode = build_fake_rank(
        "decode", max_drafts=MAX_DRAFTS, make_drafter=make_drafter, model=FakeModel(nan_token=poison)
    )
    drafted = answer_all(build_fake_rank("prefill").engine, decode.engine, requests)
    assert all(answer.failure is None for answer in drafted.values())
    assert _visible(drafted) == _visible(plain)


def test_bad_numbers_behind_an_accepted_draft_fail_their_request_alone() -> None:
    """P34 under drafts."""
    requests = _requests(6, max_tokens=25, ignore_eos=True)
    plain = _plain(requests)
    mentions = [set(plain[place].token_ids[:-1]) for place in range(6)]
    token, victim = next(
        (token, place)
        for place in range(6)
        for token in mentions[place]
        if sum(token in others for others in mentions) == 1
        and all(token not in unpack(request.prompt_token_ids) for request in requests)
    )
    known = [_whole(request, plain[request.index]) for request in requests]
    make_drafter = partial(OracleDrafter, sequences=known, hit_rate=1.0, vocab_size=VOCAB_SIZE, log=Accepted())
    decode = build_fake_rank(
        "decode", max_drafts=MAX_DRAFTS, make_drafter=make_drafter, model=FakeModel(nan_token=token)
    )
    drafted = answer_all(build_fake_rank("prefill").engine, decode.engine, requests)
    failure = drafted.pop(victim).failure
    assert failure is not None
    assert failure.kind == "numerical_error"
    assert _visible(drafted) == {index: seen for index, seen in _visible(plain).items() if index != victim}


def test_log_probabilities_belong_to_the_committed_tokens() -> None:
    requests = _requests(1, max_tokens=20, ignore_eos=True, logprobs=1)
    answer = _drafted(requests, _plain(requests), hit_rate=0.75)[0]
    token_ids = np.concatenate([unpack(part.token_ids) for part in answer.logprobs]).reshape(-1, 2)
    values = np.concatenate([unpack_floats(part.values) for part in answer.logprobs])
    assert token_ids[:, 0].tolist() == answer.token_ids[1:]
    assert np.isfinite(values).all()


def test_penalties_and_bias_see_the_drafts_of_their_own_run() -> None:
    rules = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3, "min_tokens": 9}
    requests = _requests(9, max_tokens=30, logit_bias={5: 3.0, 7: -2.0}, ignore_eos=False, top_p=0.9, top_k=20, **rules)
    plain = _plain(requests)
    for hit_rate in (0.75, 1.0):
        assert _visible(_drafted(requests, plain, hit_rate=hit_rate)) == _visible(plain)
