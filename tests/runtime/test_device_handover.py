"""Hand-overs through memory that ranks of one host share: the same answers, and no piece is lost, whatever happens."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import msgspec
import pytest
from support.rank_engines import (
    Answer,
    FakeRank,
    RunningEngine,
    admission,
    answer_all,
    build_fake_rank,
    make_request,
    run_decode,
    run_prefill,
)

from deepinfer.codec import pack, unpack
from deepinfer.platforms.memory_handle import MemoryHandle
from deepinfer.protocol import AdmittedRequest, DecodeBatch, GrammarSpec, KVHandle, PrefillBatch, PrefilledRequest

REQUESTS = [make_request(place, [place + 1, 5, 9][: 1 + place % 3] * (1 + place)) for place in range(6)]
MIB = 1 << 20


def ranks(prefill_bytes: int = MIB, decode_bytes: int = MIB, **options) -> tuple[FakeRank, FakeRank]:
    prefill = build_fake_rank("prefill", handover_bytes=prefill_bytes)
    return prefill, build_fake_rank("decode", handover_bytes=decode_bytes, **options)


def arena_of(rank: FakeRank):
    parts = rank.engine._parts
    return parts.arena if parts.role == "prefill" else parts.intake._arena


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """The answers through host memory."""
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode")
    return {index: answer.token_ids for index, answer in answer_all(prefill.engine, decode.engine, REQUESTS).items()}


@pytest.mark.parametrize(
    ("prefill_bytes", "decode_bytes", "num_on_device"),
    [(MIB, MIB, 6), (MIB, 0, 6), (MIB, 256, 6), (512, MIB, 2), (0, MIB, 0)],
    ids=["room", "no memory at decode", "full at decode", "full at prefill", "no memory at prefill"],
)
def test_answers_do_not_depend_on_the_way(
    prefill_bytes: int, decode_bytes: int, num_on_device: int, expected: dict[int, list[int]]
) -> None:
    prefill, decode = ranks(prefill_bytes, decode_bytes)
    answers = answer_all(prefill.engine, decode.engine, REQUESTS, device_handover=True)
    assert {index: answer.token_ids for index, answer in answers.items()} == expected
    counts = {"device": num_on_device, "host": 6 - num_on_device, "lie": num_on_device}
    assert prefill.engine.status()["handovers"] == counts
    ways = {way: prefill.recorder.values.get(("deepinfer_handovers", (("way", way),)), 0) for way in ("device", "host")}
    assert ways == {"device": num_on_device, "host": 6 - num_on_device}
    if decode_bytes:
        assert arena_of(decode).num_held == 0


def test_nothing_lies_on_the_device_unless_the_driver_says_so() -> None:
    prefill, decode = ranks()
    answer_all(prefill.engine, decode.engine, REQUESTS)
    assert prefill.engine.status()["handovers"] == {"device": 0, "host": 6, "lie": 0}


def test_a_piece_stays_until_its_ticket_comes_back_also_while_the_rank_is_parked() -> None:
    prefill, _ = ranks()
    with RunningEngine(prefill.engine) as running:
        done, _ = run_prefill(running, REQUESTS, wake_id=1, device_handover=True)
        wait_until(lambda: prefill.engine.status()["parked"])
        assert arena_of(prefill).num_held == 6
        tickets = [item.kv.place.ticket for item, _ in done.values()]
        num_steps = prefill.engine.status()["step"]
        prefill.engine.post(PrefillBatch(batch_id=2, wake_id=1, released=pack(tickets[:4]), device_handover=True))
        wait_until(lambda: arena_of(prefill).num_held == 2)
        assert prefill.engine.status()["step"] == num_steps, "a release made the group step"
        prefill.engine.post(PrefillBatch(batch_id=3, wake_id=2, drops_all=True))
        wait_until(lambda: arena_of(prefill).num_held == 0)


def test_samples_of_a_prompt_share_a_piece_until_the_last_has_it() -> None:
    prefill, decode = ranks(max_running=1)
    request = make_request(0, [7, 8, 9], n=3)
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, [request], wake_id=1, device_handover=True)
        answers = {place: Answer() for place in range(3)}
        run_decode(decoding, [(admission(request, done[0][0]), None)], answers, wake_id=1)
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 3
    assert arena_of(decode).num_held == 0


def test_a_changed_byte_fails_its_request_and_no_other(expected: dict[int, list[int]]) -> None:
    prefill, decode = ranks()
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, REQUESTS[:3], wake_id=1, device_handover=True)
        place = done[1][0].kv.place
        arena_of(prefill)._memory.data[place.offset + 3] ^= 1
        answers = {index: Answer(unpack(done[index][0].first_token_ids).tolist()) for index in range(3)}
        admitted = [(admission(request, done[request.index][0]), None) for request in REQUESTS[:3]]
        run_decode(decoding, admitted, answers, wake_id=1)
    failure = answers[1].failure
    assert (failure.kind, failure.retryable) == ("kv_corrupt", True)
    assert "'request-1' from prefill rank 0 is corrupt" in failure.text
    assert [answers[index].token_ids for index in (0, 2)] == [expected[0], expected[2]]
    assert arena_of(decode).num_held == 0


def test_an_error_that_nobody_foresaw_fails_its_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch, expected: dict[int, list[int]]
) -> None:
    prefill, decode = ranks()
    intake = decode.engine._parts.intake
    open_memory, num_calls = intake._map, itertools.count()

    def open_at_the_second_try(rank: int, memory: bytes):
        if not next(num_calls):
            raise RuntimeError("no pinned memory is left\nand more lines")
        return open_memory(rank, memory)

    monkeypatch.setattr(intake, "_map", open_at_the_second_try)
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, REQUESTS[:2], wake_id=1, device_handover=True)
        answers = {index: Answer(unpack(done[index][0].first_token_ids).tolist()) for index in range(2)}
        run_decode(decoding, [(entry, None) for entry in _admitted(done, REQUESTS[:2])], answers, wake_id=1)
    failure = answers[0].failure
    assert (failure.kind, failure.retryable) == ("kv_unreachable", True)
    assert failure.text.endswith("RuntimeError: no pinned memory is left")
    assert answers[1].token_ids == expected[1]


def _admitted(done: dict, requests: list) -> tuple[AdmittedRequest, ...]:
    return tuple(admission(request, done[request.index][0]) for request in requests)


@pytest.mark.parametrize("way", ["aborted", "all dropped", "held by its grammar and aborted", "too long for the cache"])
def test_a_piece_comes_back_when_its_sequence_never_runs(way: str) -> None:
    blocks = 8 if way == "too long for the cache" else 200
    prefill, decode = ranks(max_running=1, num_blocks=blocks)
    first, second = make_request(0, [1, 2], max_tokens=100), make_request(1, [3] * 40, max_tokens=5)
    if way.startswith("held"):
        grammar = GrammarSpec(kind="regex", text="[ab]{1,40}" * 30)
        second = msgspec.structs.replace(second, grammar=grammar)
        decode.engine._parts.compiler.look_up = lambda compilation: None  # never ready
        prefill_requests = [first, msgspec.structs.replace(second, grammar=None)]
    else:
        prefill_requests = [first, second]
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine):
        done, _ = run_prefill(prefilling, prefill_requests, wake_id=1, device_handover=True)
        if way != "too long for the cache":  # the other sequence has the only slot
            decode.engine.post(DecodeBatch(batch_id=1, wake_id=1, admitted=_admitted(done, [first])))
        decode.engine.post(DecodeBatch(batch_id=2, wake_id=2, admitted=_admitted(done, [second])))
        if way != "too long for the cache":
            wait_until(lambda: arena_of(decode).num_held == 1)
            ends = {"drops_all": True} if way == "all dropped" else {"aborted_indexes": pack([1])}
            decode.engine.post(DecodeBatch(batch_id=3, wake_id=3, **ends))
        wait_until(lambda: arena_of(decode).num_held == 0)
        decode.engine.post(DecodeBatch(batch_id=4, wake_id=4, drops_all=True))


# Real processes


def _prefill_rank(end) -> None:
    """Answer prompts with items until told to end; the pieces stay."""
    rank = build_fake_rank("prefill", handover_bytes=MIB)
    with RunningEngine(rank.engine) as running:
        wake_id = 0
        while (requests := end.recv()) is not None:
            wake_id += 1
            done, _ = run_prefill(running, requests, wake_id=wake_id, device_handover=True)
            end.send([done[request.index][0] for request in requests])


class PrefillProcess:
    """A prefill rank that can be killed."""

    def __init__(self) -> None:
        self.end, far = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_prefill_rank, args=(far,), daemon=True)
        self.process.start()

    def run(self, requests: list) -> list[PrefilledRequest]:
        self.end.send(requests)
        assert self.end.poll(60), "the prefill process does not answer"
        return self.end.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture
def start():
    started: list[PrefillProcess] = []

    def start_one() -> PrefillProcess:
        started.append(PrefillProcess())
        return started[-1]

    yield start_one
    for process in started:
        process.process.kill()
        process.process.join()


def decode_items(
    decoding: RunningEngine, requests: list, items: list[PrefilledRequest], wake_id: int
) -> dict[int, Answer]:
    answers = {item.index: Answer(unpack(item.first_token_ids).tolist()) for item in items}
    admitted = [(admission(request, item), None) for request, item in zip(requests, items, strict=True)]
    run_decode(decoding, admitted, answers, wake_id=wake_id)
    return answers


def test_a_killed_prefill_rank_and_its_successor(start, expected: dict[int, list[int]]) -> None:
    """What is mapped can be read, what is not is lost and may be tried again; a next life's memory takes its place."""
    decode = build_fake_rank("decode", handover_bytes=MIB)
    other = build_fake_rank("decode", handover_bytes=MIB)
    first, second = REQUESTS[:3], REQUESTS[3:]
    with RunningEngine(decode.engine) as decoding, RunningEngine(other.engine) as other_decoding:
        process = start()
        answers = decode_items(decoding, first, process.run(first), 1)
        items = process.run(second)
        process.kill()
        lost = decode_items(other_decoding, second, items, 1)
        answers |= decode_items(decoding, second, items, 2)
        assert {index: answer.token_ids for index, answer in answers.items()} == expected
        assert [answer.failure.kind for answer in lost.values()] == ["rank_lost"] * 3
        assert all(answer.failure.retryable for answer in lost.values())

        successor = start()
        again = decode_items(decoding, first, successor.run(first), 3)
        assert {index: answer.token_ids for index, answer in again.items()} == {i: expected[i] for i in range(3)}
        mapped = decode.engine._parts.intake._mapped
        assert len(mapped) == 1
        decode.engine.post(DecodeBatch(batch_id=9, wake_id=3, closes_memory=True))
        assert not mapped
        late = decode_items(decoding, second, items, 4)
        assert [answer.failure.kind for answer in late.values()] == ["rank_lost"] * 3
    assert arena_of(decode).num_held == arena_of(other).num_held == 0


def test_memory_out_of_reach_is_said_to_be(start) -> None:
    decode = build_fake_rank("decode", handover_bytes=MIB)
    items = start().run(REQUESTS[:1])

    def elsewhere(handle: KVHandle) -> KVHandle:
        found = msgspec.msgpack.decode(handle.place.memory, type=MemoryHandle)
        memory = msgspec.msgpack.encode(msgspec.structs.replace(found, namespace=1))
        return msgspec.structs.replace(handle, place=msgspec.structs.replace(handle.place, memory=memory))

    items = [msgspec.structs.replace(item, kv=elsewhere(item.kv)) for item in items]
    with RunningEngine(decode.engine) as decoding:
        (answer,) = decode_items(decoding, REQUESTS[:1], items, 1).values()
    assert (answer.failure.kind, answer.failure.retryable) == ("kv_unreachable", True)
    assert "another namespace of processes" in answer.failure.text
