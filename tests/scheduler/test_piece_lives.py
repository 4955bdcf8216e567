"""Hand-overs in memory of prefill ranks: whatever happens, each piece comes back once, and not while it may be read."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec import decode, encode, unpack
from deepinfer.protocol import (
    AdmittedRequest,
    DecodeBatch,
    DecodeResult,
    PrefillBatch,
    PrefillResult,
    RankLoad,
    RequestFailure,
    RequestOutput,
)
from deepinfer.scheduler.batch_scheduler import OutgoingBatch
from deepinfer.scheduler.piece_book import PieceBook
from deepinfer.scheduler.request_state import failed_handover
from tests.scheduler.test_batch_scheduler import Cluster, check_answers, make_request
from tests.support.fake_rank import FakeRank

MAX_PIECES = 4


class PieceCluster(Cluster):
    """Ranks that share memory; batches to decode ranks are on their way for a while, and so is the news of their end.

    Prefill ranks of a new life number their pieces from 1 again. `reaches` false: no decode rank can read any memory.
    """

    def __init__(self, *arguments: int, reaches: bool = True, **options: object) -> None:
        self.reaches = reaches
        self.on_way: dict[int, deque[tuple[OutgoingBatch, list[dict[int, object]]]]] = {}
        self.ended: list[OutgoingBatch] = []
        self.failures: list[tuple[int, RequestFailure]] = []
        self.num_fetched = 0
        super().__init__(*arguments, **options)
        self.on_way = {rank: deque() for rank in range(len(self.ranks["decode"]))}
        self.driver.allow_device_handover(True)

    def new_rank(self, role: str, rank: int) -> FakeRank:
        made = super().new_rank(role, rank)
        made.max_pieces = MAX_PIECES
        return made

    def send(self) -> list[OutgoingBatch]:
        batches = self.driver.next_batches()
        for outgoing in batches:
            batch = decode(encode(outgoing.batch))
            if isinstance(batch, PrefillBatch):
                self.ranks["prefill"][outgoing.rank].post(batch)
            else:  # what its ranks had in memory at that time can be read also when they have died since
                self.on_way[outgoing.rank].append((outgoing, [rank.pieces for rank in self.ranks["prefill"]]))
        return batches

    def deliver(self) -> None:
        """Let the oldest batch of each decode rank arrive, with luck."""
        for rank, batches in self.on_way.items():
            if batches and self.rng.random() < 0.6:
                outgoing, memory = batches.popleft()
                self._accept(self.ranks["decode"][rank], outgoing, memory)
                self.ended.append(outgoing)

    def _accept(self, rank: FakeRank, outgoing: OutgoingBatch, memory: list[dict[int, object]]) -> None:
        batch, in_order = outgoing.batch, iter(outgoing.buffers)
        assert isinstance(batch, DecodeBatch)
        admitted: list[AdmittedRequest] = []
        buffers: list[object] = []
        for entry in batch.admitted:
            place = entry.kv.place
            if place is None:
                buffers.append(next(in_order))
            elif self.reaches:
                pieces = memory[entry.kv.source_rank]
                assert place.ticket in pieces, f"the piece of {entry.request.request_id} was given back too early"
                buffers.append(pieces[place.ticket])
                self.num_fetched += 1
            else:
                failures = failed_handover(entry, kind="kv_unreachable", text="out of reach")
                self.failures += [(rank.rank, failure) for failure in failures]
                continue
            admitted.append(entry)
        rank.post(msgspec.structs.replace(batch, admitted=tuple(admitted)), buffers)

    def hear(self) -> None:
        """Tell the driver of batches that are over, in any order, and of failures."""
        self.rng.shuffle(self.ended)
        while self.ended and self.rng.random() < 0.8:
            self.driver.on_batch_over(self.ended.pop())
        for rank, failure in self.failures:
            result = DecodeResult(rank=rank, step_id=0, failures=(failure,), load=RankLoad(rank=rank))
            self.driver.on_decode_result(rank, result)
        self.failures.clear()

    def turn(self) -> None:
        self.send()
        self.deliver()
        self.hear()
        for ranks in self.ranks.values():
            for rank in ranks:
                for _ in range(self.rng.randint(0, 4)):
                    rank.step()
                result, _buffers = rank.take_results() if self.rng.random() < 0.7 else (None, [])
                if isinstance(result, PrefillResult):
                    self.driver.on_prefill_result(rank.rank, result, _buffers)
                elif isinstance(result, DecodeResult):
                    self.driver.on_decode_result(rank.rank, result)

    def restart(self, role: str) -> None:
        if role == "decode":
            for batches in self.on_way.values():
                self.ended += [outgoing for outgoing, _ in batches]
                batches.clear()
        super().restart(role)

    def replace_driver(self) -> None:
        super().replace_driver()
        self.driver.allow_device_handover(True)
        self.ended.clear()
        self.failures.clear()
        for batches in self.on_way.values():
            batches.clear()

    def check_that_nothing_is_left(self) -> None:
        for _ in range(200):
            self.turn()
        assert self.driver._book.pieces.num_held == 0
        assert [list(rank.pieces) for rank in self.ranks["prefill"]] == [[], []]


def submit(cluster: Cluster, numbers: range, **fields: object) -> list:
    requests = [make_request(number, max_prompt=9, **fields) for number in numbers]
    for request in requests:
        cluster.driver.submit("job", request)
    return requests


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lose_every=st.sampled_from([0, 5, 9]),
    abort_share=st.sampled_from([0.0, 0.3]),
    num_samples=st.integers(1, 2),
)
def test_each_piece_comes_back_once_and_is_there_while_it_is_read(
    seed: int, lose_every: int, abort_share: float, num_samples: int
) -> None:
    cluster = PieceCluster(2, 3, seed=seed, max_attempts=10**6)
    requests = submit(cluster, range(seed, seed + 25), num_samples=num_samples)
    aborted = {request.request_id for request in requests if cluster.rng.random() < abort_share}
    outputs: list[RequestOutput] = []
    to_abort = sorted(aborted)
    for turn in range(3000):
        cluster.turn()
        if to_abort and turn % 3 == 2:
            cluster.driver.abort("job", [to_abort.pop()])
        outputs += cluster.driver.take_outputs("job")
        if lose_every and turn % lose_every == lose_every - 1:
            cluster.restart(cluster.rng.choice(["prefill", "decode"]))
        if cluster.is_idle():
            break
    wanted = [request for request in requests if request.request_id not in aborted]
    check_answers(wanted, [output for output in outputs if output.request_id not in aborted])
    assert cluster.num_fetched > 0
    cluster.check_that_nothing_is_left()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num_turns=st.integers(1, 20))
def test_a_new_driver_has_all_memory_of_ranks_that_it_takes_over(seed: int, num_turns: int) -> None:
    cluster = PieceCluster(2, 2, seed=seed)
    submit(cluster, range(30))
    for _ in range(num_turns):
        cluster.turn()
    if not cluster.driver._book.samples:
        return
    cluster.replace_driver()
    again = submit(cluster, range(100, 115))
    check_answers(again, cluster.run())
    cluster.check_that_nothing_is_left()


@pytest.mark.parametrize("seed", range(5))
def test_memory_out_of_reach_fails_no_row_and_is_tried_no_more(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    cluster = PieceCluster(2, 3, seed=seed, max_attempts=1, reaches=False)
    requests = submit(cluster, range(25), num_samples=2)
    while not caplog.records or cluster.driver.counts().num_waiting:
        cluster.turn()
        trips = {sample.trip for sample in cluster.driver._book.samples.values()}
        assert {trip.num_attempts for trip in trips} <= {1}, "it counts as an attempt"
    check_answers(requests, cluster.run())
    warnings = [record.getMessage() for record in caplog.records if "out of reach" in record.getMessage()]
    assert len(warnings) == 1
    assert "through the host's object store from now on" in warnings[0]
    num_pieces = [rank.num_pieces for rank in cluster.ranks["prefill"]]
    cluster.driver.on_group_ready("decode")
    cluster.driver.allow_device_handover(True)  # these decode ranks will not reach it either
    check_answers(submit(cluster, range(50, 60)), cluster.run())
    assert [rank.num_pieces for rank in cluster.ranks["prefill"]] == num_pieces
    cluster.driver.on_group_ready("prefill")
    cluster.driver.allow_device_handover(True)  # the memory of ranks that were started anew is tried again
    check_answers(submit(cluster, range(60, 70)), cluster.run())
    assert [rank.num_pieces for rank in cluster.ranks["prefill"]] != num_pieces
    cluster.check_that_nothing_is_left()


def test_pieces_come_back_at_once_without_a_wake() -> None:
    cluster = PieceCluster(2, 1)
    submit(cluster, range(1))
    prefill = cluster.ranks["prefill"]
    cluster.send()
    while not any(rank.pieces for rank in prefill):
        for rank in prefill:
            rank.step()
    (rank,) = (rank for rank in prefill if rank.pieces)
    result, _ = rank.take_results()
    cluster.driver.on_prefill_result(rank.rank, result)
    (outgoing,) = cluster.driver.next_batches()
    assert (outgoing.role, len(outgoing.pieces), outgoing.buffers) == ("decode", 1, ())
    assert cluster.driver.next_batches() == []
    cluster.driver.on_batch_over(outgoing)
    (release,) = cluster.driver.next_batches()
    assert (release.role, release.rank, release.batch.requests) == ("prefill", rank.rank, ())
    assert release.batch.wake_id == 1
    assert unpack(release.batch.released).tolist() == list(rank.pieces)


def test_a_lost_prefill_group_has_its_memory_closed_once() -> None:
    cluster = PieceCluster(1, 2)
    cluster.driver.on_group_lost("prefill", "killed")
    closing = cluster.driver.next_batches()
    assert [(batch.role, batch.rank, batch.batch.closes_memory) for batch in closing] == [
        ("decode", 0, True),
        ("decode", 1, True),
    ]
    assert cluster.driver.next_batches() == []


def test_a_piece_is_not_released_twice() -> None:
    book = PieceBook()
    piece = book.hold(3, 77)
    book.release(piece)
    assert (book.ranks(), book.take(3), book.take(3)) == ({3}, [77], [])
    with pytest.raises(AssertionError, match="released twice"):
        book.release(piece)
    old = book.hold(3, 78)
    book.forget_all()
    book.release(old)
    assert (book.num_held, book.ranks()) == (0, set())
