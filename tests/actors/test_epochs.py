"""A rank obeys one driver at a time: no Ray here, the actor's class is called directly."""

from __future__ import annotations

import threading

import pytest
from support.fake_engine import FakeEngine

from deepinfer import codec
from deepinfer.actors.decode_actor import DecodeRank
from deepinfer.actors.prefill_actor import PrefillRank
from deepinfer.actors.rank_actor import RankActor
from deepinfer.actors.rank_life import Incarnation, RankExit, RankOrigin
from deepinfer.codec import pack, unpack
from deepinfer.errors import SupersededError
from deepinfer.protocol import (
    AdmittedRequest,
    DecodeBatch,
    DecodeResult,
    PrefillBatch,
    PrefillResult,
    Request,
    SamplingParams,
)


def make_rank(kind: type[RankActor], *, step_seconds: float = 0.0) -> RankActor:
    origin = RankOrigin(engine="test", epoch=1, incarnation=Incarnation(number=1, token="t"))
    actor = kind(origin, 0, 1, "warning")
    actor._engine = FakeEngine(role=kind.role, rank=0, max_running=8, step_seconds=step_seconds)
    actor._engine.results_ready = actor._news.set
    return actor


def make_request(index: int, *, num_samples: int = 1, max_tokens: int = 5) -> Request:
    return Request(
        request_id=f"r{index}",
        index=index,
        prompt_token_ids=pack([7, index]),
        num_prompt_tokens=2,
        num_samples=num_samples,
        sampling=SamplingParams(max_tokens=max_tokens, n=num_samples),
    )


def prefill_batch(*requests: Request) -> bytes:
    return codec.encode(PrefillBatch(batch_id=1, wake_id=1, requests=requests))


@pytest.fixture
def start():
    """Run the steps of ranks on threads that end with the test."""
    ranks: list[tuple[RankActor, threading.Thread]] = []

    def start_rank(actor: RankActor) -> None:
        thread = threading.Thread(target=actor.run)
        thread.start()
        ranks.append((actor, thread))

    yield start_rank
    for actor, thread in ranks:
        actor._engine.stop()
        thread.join(20)
        assert not thread.is_alive()


def take(actor: RankActor, epoch: int) -> PrefillResult | DecodeResult | None:
    while True:
        data, _, _ = actor.next_results(epoch, 0.0)
        if data:
            return codec.decode(data)


def test_calls_of_an_older_driver_are_refused_and_give_the_rank_nothing() -> None:
    actor = make_rank(PrefillRank)
    actor.accept(1, prefill_batch(make_request(0)))
    assert actor.adopt(2, 2 << 32) == 1
    queued = actor._engine._inbox.qsize()
    for call in (
        lambda: actor.accept(1, prefill_batch(make_request(1))),
        lambda: actor.next_results(1, 0.0),
        lambda: actor.stop(1),
        lambda: actor.watch(1),
        lambda: actor.adopt(2, 5 << 32),
        lambda: actor.adopt(1, 5 << 32),
        lambda: actor.accept(3, prefill_batch(make_request(1))),  # nor of one that has not taken over
    ):
        with pytest.raises(SupersededError, match="epoch"):
            call()
    assert actor._engine._inbox.qsize() == queued
    actor.accept(2, prefill_batch(make_request(1)))
    assert actor._engine._inbox.qsize() == queued + 1


def test_a_call_that_is_being_served_ends_before_the_take_over() -> None:
    actor = make_rank(PrefillRank)
    is_posting, go_on = threading.Event(), threading.Event()
    post = actor._engine.post

    def slow_post(message, buffers=()) -> None:
        if not message.drops_all:
            is_posting.set()
            assert go_on.wait(20)
        post(message, buffers)

    actor._engine.post = slow_post
    accepting = threading.Thread(target=actor.accept, args=(1, prefill_batch(make_request(4))))
    accepting.start()
    assert is_posting.wait(20)
    first_index: list[int] = []
    adopting = threading.Thread(target=lambda: first_index.append(actor.adopt(2, 2 << 32)))
    adopting.start()
    adopting.join(0.2)
    assert adopting.is_alive()
    go_on.set()
    adopting.join(20)
    accepting.join(20)
    assert first_index == [5]
    assert [message.drops_all for message, _ in list(actor._engine._inbox.queue)] == [False, True]


def test_a_new_driver_gets_no_results_of_the_old_one_and_free_indexes(start, monkeypatch) -> None:
    monkeypatch.setattr("deepinfer.actors.kv_channel.ray.put", lambda buffer: buffer)
    actor = make_rank(PrefillRank)
    start(actor)
    actor.accept(1, prefill_batch(make_request(3, num_samples=4)))
    while not actor._engine._prefilled:
        pass
    assert actor.adopt(2, 2 << 32) == 7
    assert actor.next_results(2, 0.0)[0] == b""
    actor.accept(2, prefill_batch(make_request(7)))
    result = take(actor, 2)
    assert isinstance(result, PrefillResult)
    assert [item.index for item in result.items] == [7]


def test_a_long_poll_that_began_before_takes_nothing_after(start) -> None:
    """The old driver's poll may still be waiting when the new one takes over: its news are not for it."""
    actor = make_rank(PrefillRank)
    start(actor)
    errors: list[BaseException] = []

    def poll() -> None:
        try:
            actor.next_results(1, 0.0)
        except SupersededError as error:
            errors.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    actor.adopt(2, 2 << 32)
    actor.accept(2, prefill_batch(make_request(0)))
    thread.join(20)
    assert len(errors) == 1
    assert [item.index for item in take(actor, 2).items] == [0]


def test_running_sequences_of_the_old_driver_end(start) -> None:
    actor, prefill = make_rank(DecodeRank, step_seconds=0.001), make_rank(PrefillRank)
    requests = [make_request(index, max_tokens=4000) for index in range(3)]
    for request in requests:
        prefill._engine._prefill(request)
    result, buffers = prefill._engine.take_results()
    admitted = tuple(
        AdmittedRequest(request=request, sample_offsets=pack([0]), first_token_ids=item.first_token_ids, kv=item.kv)
        for request, item in zip(requests, result.items, strict=True)
    )
    start(actor)
    actor.accept(1, codec.encode(DecodeBatch(batch_id=1, wake_id=1, admitted=admitted)), *buffers)
    take(actor, 1)
    assert actor.adopt(2, 2 << 32) == 3
    while actor._engine._running:
        pass
    late = actor.next_results(2, 0.0)[0]  # what was being computed at that time may still come, under old indexes
    assert not late or max(unpack(codec.decode(late).sequence_indexes)) < 3
    assert actor.next_results(2, 0.0)[0] == b""


def test_only_the_present_driver_hears_how_the_rank_ended(start) -> None:
    actor = make_rank(DecodeRank)
    answers: list[object] = []

    def watch(epoch: int) -> None:
        try:
            answers.append(actor.watch(epoch))
        except SupersededError as error:
            answers.append(type(error))

    old = threading.Thread(target=watch, args=(1,))
    old.start()
    actor.adopt(2, 2 << 32)
    old.join(20)
    assert answers == [SupersededError]
    new = threading.Thread(target=watch, args=(2,))
    new.start()
    actor._engine.post(None)  # type: ignore[arg-type]  # breaks the fake rank
    actor.run()
    new.join(20)
    assert isinstance(answers[1], RankExit)
    assert "AttributeError" in answers[1].cause
