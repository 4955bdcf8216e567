"""Grammars through rank engines with the fake model: what is allowed comes out, whatever else happens to a rank."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest
from support.fake_model import VOCAB_SIZE, FakeModel
from support.oracle import Accepted, OracleDrafter
from support.rank_engines import (
    EOS,
    Answer,
    RunningEngine,
    answer_all,
    build_fake_rank,
    make_request,
    run_prefill,
)
from support.virtual_stream import VirtualClock, VirtualModel, VirtualStream

from deepinfer.codec import pack, unpack
from deepinfer.protocol import FinishCode, GrammarSpec, PrefillBatch, Request
from deepinfer.structured_outputs import compiler as compiler_module

PATTERNS = ["[0-9]{2,5}", "1(?:2|3)*4", "[0-9]+:[0-9]{2}", "7?", "!{3,40}"]


def _regex(pattern: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=pattern)


def _requests(count: int, **sampling: Any) -> list[Request]:
    """Every second one has a grammar, in turn one of `PATTERNS`."""
    numbers = random.Random(3)
    requests = []
    for place in range(count):
        prompt = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 20))]
        options = {"max_tokens": 60, "temperature": 0.0 if place % 3 == 0 else 1.0, "ignore_eos": False} | sampling
        request = make_request(10 * place, prompt, **options)
        spec = _regex(PATTERNS[place // 2 % len(PATTERNS)]) if place % 2 else None
        requests.append(msgspec.structs.replace(request, grammar=spec))
    return requests


def _answers(requests: list[Request], **rank: Any) -> dict[int, Answer]:
    prefill = build_fake_rank("prefill", max_tokens_per_step=16)
    return answer_all(prefill.engine, build_fake_rank("decode", **rank).engine, requests)


def _tokens(answers: dict[int, Answer]) -> dict[int, list[int]]:
    assert [answer.failure for answer in answers.values() if answer.failure] == []
    return {index: answer.token_ids for index, answer in answers.items()}


def _check(requests: list[Request], answers: dict[int, Answer]) -> None:
    for request in requests:
        if request.grammar is None:
            continue
        for sample in range(request.num_samples):
            answer = answers[request.index + sample]
            text = bytes(token_id for token_id in answer.token_ids if token_id != EOS).decode()
            if answer.finish is FinishCode.STOP:
                assert answer.token_ids[-1] == EOS
                assert re.fullmatch(request.grammar.text, text), (request.grammar, text)
            else:  # `+` and `*` may go on for ever
                assert answer.finish is FinishCode.LENGTH
                assert "+" in request.grammar.text or "*" in request.grammar.text


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    requests = _requests(20)
    answers = _answers(requests, asynchronous=False)
    _check(requests, answers)
    return _tokens(answers)


def test_rows_without_a_grammar_are_what_they_are_alone(expected: dict[int, list[int]]) -> None:
    free = [request for request in _requests(20) if request.grammar is None]
    assert _tokens(_answers(free)) == {request.index: expected[request.index] for request in free}


def test_steps_in_flight_change_nothing(expected: dict[int, list[int]]) -> None:
    assert _tokens(_answers(_requests(20))) == expected


def test_preemption_changes_nothing(expected: dict[int, list[int]]) -> None:
    answers = _answers(_requests(20), num_blocks=24, max_model_len=90)
    assert sum(answer.num_preemptions for answer in answers.values()) > 0
    assert _tokens(answers) == expected


@pytest.mark.parametrize("hit_rate", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafts_change_nothing(expected: dict[int, list[int]], hit_rate: float, asynchronous: bool) -> None:
    """P19 among them: an oracle drafts the end token and goes on behind it; wrong drafts break the grammar."""
    requests, log = _requests(20), Accepted()
    known = [[*unpack(r.prompt_token_ids).tolist(), *expected[r.index], 5, 6, 7, 8, 9] for r in requests]

    def make_drafter(table: Any) -> OracleDrafter:
        return OracleDrafter(table, sequences=known, hit_rate=hit_rate, vocab_size=VOCAB_SIZE, log=log)

    answers = _answers(requests, max_drafts=5, make_drafter=make_drafter, asynchronous=asynchronous)
    assert _tokens(answers) == expected
    assert (sum(answer.num_accepted for answer in answers.values()) > 0) == (hit_rate > 0)


def test_samples_share_a_grammar_and_nothing_else() -> None:
    requests = [request for request in _requests(8, n=3, temperature=1.0) if request.grammar]
    answers = _answers(requests)
    _check(requests, answers)
    assert len({tuple(answer.token_ids) for answer in answers.values()}) > len(requests)


def test_a_replay_goes_on_in_the_grammar() -> None:
    request = msgspec.structs.replace(
        make_request(0, [3, 4], max_tokens=20, ignore_eos=False), grammar=_regex("[0-9]{9}")
    )
    whole = _tokens(_answers([request]))[0]
    for kept in range(1, 9):
        replayed = msgspec.structs.replace(request, output_token_ids=pack(whole[:kept]))
        assert whole[:kept] + _tokens(_answers([replayed]))[0] == whole


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (GrammarSpec(kind="ebnf", text="root ::= undefined"), "invalid_grammar"),
        (GrammarSpec(kind="ebnf", text="root ::= root"), "grammar_error"),
        (GrammarSpec(kind="ebnf", text='root ::= "12" root2\nroot2 ::= root2'), "grammar_error"),
        (GrammarSpec(kind="tool_calls", text="[]"), "not_available"),
    ],
)
def test_a_grammar_that_leads_nowhere_fails_its_request_alone(spec: GrammarSpec, kind: str) -> None:
    """P22; a grammar may be found out while it is compiled, at its first token or later."""
    requests = _requests(6)
    requests[2] = msgspec.structs.replace(requests[2], grammar=spec)
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode")
    answers = answer_all(prefill.engine, decode.engine, requests)
    failure = answers.pop(requests[2].index).failure
    assert failure is not None
    assert (failure.kind, failure.retryable) == (kind, False)
    plain = _answers([request for request in requests if request is not requests[2]])
    assert _tokens(answers) == _tokens(plain)


def test_a_slow_grammar_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request is answered while it is compiled; aborted meanwhile, it leaves nothing behind."""
    build = compiler_module.build_grammar
    begun, slow = compiler_module.threading.Event(), compiler_module.threading.Event()

    def build_slowly(spec: GrammarSpec, **options: Any) -> Any:
        begun.set()
        assert slow.wait(60)
        return build(spec, **options)

    monkeypatch.setattr(compiler_module, "build_grammar", build_slowly)
    held, aborted, free = (make_request(index, [5, 6], max_tokens=1, ignore_eos=False) for index in (1, 2, 3))
    held = msgspec.structs.replace(held, grammar=_regex("[0-9]"))
    aborted = msgspec.structs.replace(aborted, grammar=_regex("[0-9]{2}"))
    with RunningEngine(build_fake_rank("prefill").engine) as running:
        running.engine.post(PrefillBatch(batch_id=1, wake_id=1, requests=(held, aborted)))
        assert begun.wait(60)
        done, _ = run_prefill(running, [free], wake_id=2)
        assert set(done) == {3}
        running.engine.post(PrefillBatch(batch_id=3, wake_id=3, aborted_indexes=pack([2])))
        slow.set()
        result, _ = running.next_results()
        assert [item.index for item in result.items] == [1]


@pytest.mark.parametrize("grammar", [None, _regex("[0-9]{50}")])
def test_masks_are_built_while_the_rows_run(grammar: GrammarSpec | None) -> None:
    """Host time between two steps costs nothing, with a grammar no more than without; see `test_overlap`."""
    clock, num_steps = VirtualClock(), 20
    decode = build_fake_rank("decode", model=VirtualModel(clock, 0.010), stream=VirtualStream(clock))

    def spend_host_time(event: str, step_id: int) -> None:
        clock.now += 0.008 if event == "read" else 0.0

    decode.observers.append(spend_host_time)
    request = make_request(0, [1, 2, 3], max_tokens=num_steps + 1, ignore_eos=False)
    begin = clock.now
    answers = answer_all(
        build_fake_rank("prefill", model=FakeModel()).engine,
        decode.engine,
        [msgspec.structs.replace(request, grammar=grammar)],
    )
    assert len(answers[0].token_ids) == num_steps + 1 or grammar is None
    steps = len(answers[0].token_ids) - 1
    assert clock.now - begin == pytest.approx(steps * 0.010 + 0.008, abs=0.011)


def test_many_rows_of_one_grammar_end_each_in_its_own_time() -> None:
    """P24: the end of one row ends no other."""
    spec = _regex("[!-?]{5,400}")
    bias = {place: {EOS: [-100.0, 0.0, 100.0][place % 3]} for place in range(200)}
    requests = [
        msgspec.structs.replace(
            make_request(place, [place % 60 + 1], max_tokens=450, ignore_eos=False, logit_bias=bias[place]),
            grammar=spec,
        )
        for place in range(200)
    ]
    prefill = build_fake_rank("prefill", max_running=64, num_blocks=4000, max_model_len=512)
    decode = build_fake_rank("decode", max_running=64, num_blocks=64 * 130, max_model_len=512)
    answers = answer_all(prefill.engine, decode.engine, requests)
    _check(requests, answers)
    lengths = [len(answers[place].token_ids) - 1 for place in range(200)]
    assert {lengths[place] for place in range(0, 200, 3)} == {400}
    assert {lengths[place] for place in range(2, 200, 3)} == {5}
    assert len({lengths[place] for place in range(1, 200, 3)}) > 10
