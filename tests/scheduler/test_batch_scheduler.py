"""The driver's scheduler with fake ranks: every request is answered exactly once, with the tokens it has alone."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec import decode, encode, pack, pack_codes, unpack
from deepinfer.config import SchedulerConfig
from deepinfer.errors import RequestError
from deepinfer.protocol import (
    DecodeBatch,
    DecodeResult,
    FinishCode,
    KVHandle,
    LogprobColumns,
    PrefillBatch,
    PrefilledRequest,
    PrefillResult,
    RankLoad,
    Request,
    RequestFailure,
    RequestOutput,
    SamplingParams,
)
from deepinfer.scheduler.batch_scheduler import BatchScheduler, OutgoingBatch
from deepinfer.scheduler.load_balancer import DecodeCapacity
from tests.support.fake_device import GROUPS, expected_output
from tests.support.fake_rank import FakeRank

MAX_MODEL_LEN = 80


def make_request(number: int, *, max_prompt: int = 30, **changes: object) -> Request:
    rng = random.Random(number)
    num_prompt_tokens = rng.randint(1, max_prompt)
    sampling = changes.pop("sampling", SamplingParams(max_tokens=rng.randint(1, 40), seq_seed=number))
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=pack([rng.randrange(1, 40) for _ in range(num_prompt_tokens)]),
        num_prompt_tokens=num_prompt_tokens,
        sampling=sampling,
        **changes,
    )


class Cluster:
    """A driver and its ranks in one process; batches cross as bytes."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        *,
        num_blocks: tuple[int, int] = (30, 21),
        num_slots: int = 5,
        max_rows: int = 1,
        seed: int = 0,
        max_attempts: int = 3,
        max_expected: int = 4096,
        fails=lambda token_id: False,
        **config: object,
    ) -> None:
        self.rng = random.Random(seed)
        self.blocks = {"main": num_blocks[0], "index": num_blocks[1]}
        self.num_slots, self.max_rows, self.fails = num_slots, max_rows, fails
        self.ranks: dict[str, list[FakeRank]] = {
            "prefill": [self.new_rank("prefill", rank) for rank in range(num_prefill)],
            "decode": [self.new_rank("decode", rank) for rank in range(num_decode)],
        }
        self.max_attempts, self.max_expected, self.config = max_attempts, max_expected, config
        self.driver = self.new_driver()
        self.max_kv_bytes = 0

    def new_driver(self, *, first_index: int = 0, first_wake_id: int = 0) -> BatchScheduler:
        return BatchScheduler(
            config=SchedulerConfig(**self.config),
            prefill_ranks=range(len(self.ranks["prefill"])),
            decode_ranks=[
                DecodeCapacity(rank, self.blocks, self.num_slots) for rank in range(len(self.ranks["decode"]))
            ],
            groups=GROUPS,
            draw_seed=lambda: 77,
            max_attempts=self.max_attempts,
            max_expected_output_tokens=self.max_expected,
            first_index=first_index,
            first_wake_id=first_wake_id,
        )

    def replace_driver(self) -> None:
        """Lose the driver and all it knows; a new one takes the ranks over as they are."""
        first_index = 1 + max(self.driver._book.samples)
        self.driver = self.new_driver(first_index=first_index, first_wake_id=10**6)
        for role, ranks in self.ranks.items():
            for rank in ranks:
                batch_type = PrefillBatch if role == "prefill" else DecodeBatch
                rank.post(batch_type(batch_id=0, wake_id=10**6, drops_all=True))

    def new_rank(self, role: str, rank: int) -> FakeRank:
        return FakeRank(
            role,
            rank,
            num_blocks=self.blocks,
            num_slots=self.num_slots,
            max_model_len=MAX_MODEL_LEN,
            max_rows_per_slot=self.max_rows if role == "decode" else 1,
            num_commits=lambda length: self.rng.randint(1, 6),
            fails=self.fails,
        )

    def restart(self, role: str) -> None:
        self.driver.on_group_lost(role, "killed")
        self.ranks[role] = [self.new_rank(role, rank) for rank in range(len(self.ranks[role]))]
        self.driver.on_group_ready(role)

    def send(self) -> list[OutgoingBatch]:
        batches = self.driver.next_batches()
        for outgoing in batches:
            batch = decode(encode(outgoing.batch))
            assert isinstance(batch, PrefillBatch | DecodeBatch)
            self.ranks[outgoing.role][outgoing.rank].post(batch, outgoing.buffers)
        self.max_kv_bytes = max(self.max_kv_bytes, self.driver.counts().kv_bytes_in_flight)
        return batches

    def turn(self) -> None:
        """Send, let every rank run a few steps, take some results."""
        self.send()
        for ranks in self.ranks.values():
            for rank in ranks:
                for _ in range(self.rng.randint(0, 4)):
                    rank.step()
                if self.rng.random() < 0.7:
                    result, buffers = rank.take_results()
                    if isinstance(result, PrefillResult):
                        self.driver.on_prefill_result(rank.rank, result, buffers)
                    elif isinstance(result, DecodeResult):
                        self.driver.on_decode_result(rank.rank, result)
        assert {rank.wake_id for rank in self.ranks["decode"]} == {self.ranks["decode"][0].wake_id}

    def is_idle(self) -> bool:
        counts = self.driver.counts()
        return not (counts.num_waiting or counts.num_prefilling or counts.num_prefilled or counts.num_decoding)

    def run(self, job_id: str = "job", *, max_turns: int = 3000, lose_every: int = 0) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for turn in range(max_turns):
            self.turn()
            outputs.extend(self.driver.take_outputs(job_id))
            if lose_every and turn % lose_every == lose_every - 1:
                self.restart(self.rng.choice(["prefill", "decode"]))
            if self.is_idle():
                break
        else:
            raise AssertionError(f"no progress: {self.driver.counts()}")
        outputs.extend(self.driver.take_outputs(job_id))
        assert self.driver.counts().kv_bytes_in_flight == 0
        assert self.driver._balancer.is_idle(), "a reservation was not freed"
        assert not self.driver._book.samples
        assert not self.driver._book.trips
        return outputs


def check_answers(requests: list[Request], outputs: list[RequestOutput]) -> None:
    answers: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        assert output.error is None
        tokens = answers.setdefault((output.request_id, output.sample), [])
        assert output.first_position == len(tokens)
        tokens.extend(unpack(output.token_ids).tolist())
    finals = Counter((output.request_id, output.sample) for output in outputs if output.finish is not FinishCode.NONE)
    expected = {
        (request.request_id, sample): expected_output(request, sample, MAX_MODEL_LEN)
        for request in requests
        for sample in range(request.num_samples)
    }
    assert answers == expected
    assert finals == dict.fromkeys(expected, 1)


# Whole ways


def test_four_and_sixty_four_ranks_answer_every_request_once() -> None:
    cluster = Cluster(4, 64)
    requests = [make_request(number) for number in range(400)]
    for request in requests:
        cluster.driver.submit("job", request)
    outputs = cluster.run()
    check_answers(requests, outputs)
    assert {output.prefill_rank for output in outputs} == set(range(4))
    assert {output.decode_rank for output in outputs if len(output.token_ids) > 4} == set(range(64))
    assert cluster.driver.counts().num_finished == 400


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    max_rows=st.sampled_from([1, 3, 6]),
    max_expected=st.sampled_from([1, 4096]),
    lose_every=st.sampled_from([0, 0, 7]),
    num_samples=st.integers(1, 3),
    stream=st.booleans(),
)
def test_small_caches_preemptions_and_losses_change_no_token(
    seed: int, max_rows: int, max_expected: int, lose_every: int, num_samples: int, stream: bool
) -> None:
    cluster = Cluster(2, 3, max_rows=max_rows, seed=seed, max_attempts=10**6, max_expected=max_expected)
    requests = [make_request(seed + n, num_samples=num_samples, stream=stream) for n in range(25)]
    for request in requests:
        cluster.driver.submit("job", request)
    check_answers(requests, cluster.run(lose_every=lose_every))


def test_tight_expectations_cause_preemptions_and_full_ones_do_not() -> None:
    preempted = []
    for max_expected in (1, 4096):
        cluster = Cluster(1, 1, num_blocks=(24, 40), num_slots=9, max_expected=max_expected)
        requests = [make_request(n, sampling=SamplingParams(max_tokens=40, seq_seed=n)) for n in range(30)]
        for request in requests:
            cluster.driver.submit("job", request)
        check_answers(requests, cluster.run())
        preempted.append(cluster.driver.counts().num_preempted)
    assert preempted[0] > 0
    assert preempted[1] == 0


def test_kv_bytes_in_flight_stay_below_their_bound() -> None:
    cluster = Cluster(3, 3, max_kv_bytes_in_flight=20_000)
    requests = [make_request(number) for number in range(60)]
    for request in requests:
        cluster.driver.submit("job", request)
    check_answers(requests, cluster.run())
    assert 0 < cluster.max_kv_bytes <= 20_000


def test_a_single_hand_over_above_the_bound_still_runs() -> None:
    cluster = Cluster(1, 1, max_kv_bytes_in_flight=10)
    requests = [make_request(number) for number in range(5)]
    for request in requests:
        cluster.driver.submit("job", request)
    check_answers(requests, cluster.run())


def test_a_failing_row_fails_its_request_alone() -> None:
    requests = [make_request(number) for number in range(40)]
    bad = {r.request_id for r in requests if 7 in expected_output(r, 0, MAX_MODEL_LEN)}
    assert 0 < len(bad) < 40
    cluster = Cluster(2, 3, fails=lambda token_id: token_id == 7)
    for request in requests:
        cluster.driver.submit("job", request)
    outputs = cluster.run()
    errors = [output for output in outputs if output.error is not None]
    assert Counter(output.request_id for output in errors) == dict.fromkeys(bad, 1)
    check_answers([r for r in requests if r.request_id not in bad], [o for o in outputs if o.error is None])
    assert cluster.driver.counts().num_failed == len(bad)


def test_two_jobs_may_use_the_same_ids() -> None:
    cluster = Cluster(2, 2)
    jobs = {"a": [make_request(n) for n in range(10)], "b": [make_request(n + 50) for n in range(10)]}
    for job_id, requests in jobs.items():
        for n, request in enumerate(requests):
            fields = {f: getattr(request, f) for f in request.__struct_fields__}
            requests[n] = Request(**fields | {"request_id": f"r{n}"})
            cluster.driver.submit(job_id, requests[n])
    outputs_a = cluster.run("a")
    check_answers(jobs["a"], outputs_a)
    check_answers(jobs["b"], list(cluster.driver.take_outputs("b")))


# Losses


def test_what_is_lost_too_often_fails_with_the_reason() -> None:
    cluster = Cluster(1, 1, max_attempts=2)
    cluster.driver.submit("job", make_request(1))
    for _ in range(2):
        cluster.send()
        cluster.restart("prefill")
    (output,) = cluster.driver.take_outputs("job")
    assert output.error is not None
    assert (output.error.kind, output.request_id) == ("rank_lost", "r1")
    assert "killed" in output.error.text
    assert cluster.is_idle()


def test_nothing_is_sent_while_a_group_is_lost() -> None:
    cluster = Cluster(1, 2)
    cluster.driver.submit("job", make_request(1))
    cluster.driver.on_group_lost("decode", "killed")
    assert cluster.driver.next_batches() == []
    cluster.driver.on_group_ready("decode")
    assert [batch.role for batch in cluster.driver.next_batches()] == ["prefill"]


def test_late_results_of_a_lost_group_are_ignored() -> None:
    cluster = Cluster(1, 1)
    request = make_request(3)
    cluster.driver.submit("job", request)
    cluster.send()
    (rank,) = cluster.ranks["prefill"]
    for _ in range(6):
        rank.step()
    result, buffers = rank.take_results()
    assert isinstance(result, PrefillResult)
    cluster.restart("prefill")
    cluster.driver.on_prefill_result(0, result, buffers)
    check_answers([request], cluster.run())


@pytest.mark.parametrize("num_turns", [1, 3, 6, 10, 15])
def test_a_new_driver_finds_room_on_ranks_full_of_anothers_work(num_turns: int) -> None:
    """Results of the old work still come, some with the KV of a prompt; the new driver's answers are its own."""
    cluster = Cluster(2, 2, max_rows=3, seed=num_turns)
    for number in range(40):
        cluster.driver.submit("job", make_request(number, max_prompt=9))
    for _ in range(num_turns):
        cluster.turn()
    cluster.replace_driver()
    again = [make_request(100 + number, num_samples=2) for number in range(20)]
    for request in again:
        cluster.driver.submit("job", request)
    check_answers(again, cluster.run())
    for rank in (*cluster.ranks["prefill"], *cluster.ranks["decode"]):
        while rank.scheduler.has_work():
            rank.step()
        assert rank.scheduler.load().num_running == 0


def test_a_retryable_failure_is_sent_again_with_its_output() -> None:
    driver = Cluster(1, 1).driver
    driver.submit("job", make_request(5, sampling=SamplingParams(max_tokens=9, seq_seed=1)))
    driver.next_batches()
    driver.on_prefill_result(0, prefilled(0, [11]), ["buffer"])
    (outgoing,) = driver.next_batches()
    assert outgoing.buffers == ("buffer",)
    failure = RequestFailure(request_id="r5", index=0, kind="kv_checksum", text="damaged", retryable=True)
    driver.on_decode_result(0, DecodeResult(rank=0, step_id=1, failures=(failure,), load=RankLoad(rank=0)))
    (again,) = (batch.batch for batch in driver.next_batches())
    assert isinstance(again, PrefillBatch)
    assert [unpack(request.output_token_ids).tolist() for request in again.requests] == [[11]]


# Details


def prefilled(index: int, tokens: list[int], code: FinishCode = FinishCode.NONE, **fields: object) -> PrefillResult:
    kv = KVHandle(request_id="", source_rank=0, num_tokens=1, layout_digest="", groups=(), nbytes=10, checksum=0)
    item = PrefilledRequest(
        request_id="",
        index=index,
        first_token_ids=pack(tokens),
        finish_codes=pack_codes([code] * len(tokens)),
        kv=kv if code is FinishCode.NONE else None,
        **fields,
    )
    return PrefillResult(rank=0, items=(item,), load=RankLoad(rank=0))


def decoded(entries: list[tuple[int, list[int], FinishCode]], **fields: object) -> DecodeResult:
    return DecodeResult(
        rank=0,
        step_id=1,
        sequence_indexes=pack([index for index, _, _ in entries]),
        num_tokens=pack([len(tokens) for _, tokens, _ in entries]),
        token_ids=pack([token for _, tokens, _ in entries for token in tokens]),
        finish_codes=pack_codes([code for _, _, code in entries]),
        load=RankLoad(rank=0),
        **fields,
    )


def columns(*values: int) -> LogprobColumns:
    array = np.array(values)
    return LogprobColumns(counts=pack(np.ones_like(array)), token_ids=pack(array), values=array.astype("<f4").tobytes())


def test_a_live_id_is_refused_and_a_finished_one_is_free_again() -> None:
    driver = Cluster(1, 1).driver
    driver.submit("job", make_request(1))
    with pytest.raises(RequestError, match="r1") as caught:
        driver.submit("job", make_request(1))
    assert (caught.value.code, caught.value.param) == ("duplicate_request_id", "request_id")
    driver.next_batches()
    driver.on_prefill_result(0, prefilled(0, [4], FinishCode.LENGTH))
    driver.submit("job", make_request(1))


def test_a_prompt_that_no_decode_rank_can_hold_is_refused() -> None:
    driver = Cluster(1, 1, num_blocks=(4, 4)).driver
    with pytest.raises(RequestError, match="13 tokens") as caught:
        driver.submit(
            "job", Request(request_id="r", prompt_token_ids=b"", num_prompt_tokens=13, sampling=SamplingParams())
        )
    assert caught.value.code == "cache_too_small"


def test_a_seed_is_drawn_once_and_reported() -> None:
    driver = Cluster(1, 1).driver
    driver.submit("job", make_request(1, sampling=SamplingParams(max_tokens=3)))
    (outgoing,) = driver.next_batches()
    assert isinstance(outgoing.batch, PrefillBatch)
    assert outgoing.batch.requests[0].sampling.seq_seed == 77
    driver.on_prefill_result(0, prefilled(0, [4], FinishCode.LENGTH))
    assert driver.take_outputs("job")[0].seed == 77


def test_every_admission_wakes_the_whole_group_with_a_growing_id() -> None:
    driver = Cluster(2, 3).driver
    assert driver.next_batches() == []
    driver.submit("job", make_request(1))
    first = driver.next_batches()
    assert [(batch.role, batch.rank, batch.batch.wake_id) for batch in first] == [("prefill", 0, 1), ("prefill", 1, 1)]
    assert [len(batch.batch.requests) for batch in first] == [1, 0]
    driver.on_prefill_result(0, prefilled(0, [4]))
    assert [(b.role, b.rank, b.batch.wake_id) for b in driver.next_batches()] == [("decode", r, 1) for r in range(3)]
    driver.submit("job", make_request(2))
    assert {batch.batch.wake_id for batch in driver.next_batches()} == {2}


def test_aborts_reach_only_the_rank_that_has_the_request() -> None:
    cluster = Cluster(2, 2)
    driver = cluster.driver
    for number in range(3):
        driver.submit("job", make_request(number, num_samples=2))
    driver.abort("job", ["r2", "unknown"])
    driver.next_batches()
    driver.on_prefill_result(0, prefilled(0, [4, 5]))
    driver.next_batches()
    driver.abort("job", ["r0", "r1"])
    aborts = {(b.role, b.rank): unpack(b.batch.aborted_indexes).tolist() for b in driver.next_batches()}
    assert {key: sorted(indexes) for key, indexes in aborts.items()} == {("prefill", 1): [2], ("decode", 0): [0, 1]}
    assert driver.take_outputs("job") == ()
    assert cluster.is_idle()
    assert driver._balancer.is_idle()


def test_random_aborts_and_dropped_jobs_leave_nothing_behind() -> None:
    cluster = Cluster(2, 3, seed=5)
    kept = [make_request(number) for number in range(20)]
    for request in kept:
        cluster.driver.submit("job", request)
    for number in range(100, 160):
        cluster.driver.submit("other", make_request(number, num_samples=1 + number % 2))
    for number in range(100, 140):
        cluster.turn()
        cluster.driver.abort("other", [f"r{number}"])
    cluster.driver.drop_job("other")
    check_answers(kept, cluster.run())
    assert cluster.driver.take_outputs("other") == ()
    for _ in range(5):
        cluster.turn()
    for ranks in cluster.ranks.values():
        for rank in ranks:
            for _ in range(3):
                rank.step()
            assert not rank.scheduler.has_work()


def test_capacity_counts_unfinished_requests() -> None:
    driver = Cluster(1, 1, max_in_flight=3).driver
    assert driver.capacity("job") == 3
    driver.submit("job", make_request(1))
    assert (driver.capacity("job"), driver.capacity("other")) == (2, 3)
    driver.abort("job", ["r1"])
    assert driver.capacity("job") == 3


def test_logprobs_and_prompt_logprobs_reach_the_right_sample() -> None:
    driver = Cluster(1, 1).driver
    driver.submit("job", make_request(1, num_samples=2, sampling=SamplingParams(max_tokens=9, seq_seed=1, logprobs=0)))
    driver.next_batches()
    item = prefilled(0, [4, 5], first_logprobs=columns(4, 5), prompt_logprobs=columns(1, 2))
    driver.on_prefill_result(0, item)
    driver.next_batches()
    result = decoded(
        [(0, [6], FinishCode.LENGTH), (1, [7, 8], FinishCode.STOP)],
        logprob_sequences=pack([1]),
        logprobs=(columns(7, 8),),
    )
    driver.on_decode_result(0, result)
    first, second = driver.take_outputs("job")
    assert [unpack(part.token_ids).tolist() for part in first.logprobs] == [[4]]
    assert [unpack(part.token_ids).tolist() for part in second.logprobs] == [[5], [7, 8]]
    assert first.prompt_logprobs == columns(1, 2)
    assert second.prompt_logprobs is None


def test_tokens_of_answers_that_go_on_are_counted_for_their_job() -> None:
    driver = Cluster(1, 1).driver
    driver.submit("job", make_request(1))
    driver.submit("other", make_request(1))
    driver.next_batches()
    driver.on_prefill_result(0, prefilled(0, [4]))
    driver.next_batches()
    driver.on_decode_result(0, decoded([(0, [6, 7], FinishCode.NONE)]))
    assert driver.take_outputs("job") == ()
    assert [driver.take_num_generated(job) for job in ("job", "job", "other", "none")] == [3, 0, 0, 0]


def test_too_many_logprob_bytes_fail_the_request() -> None:
    driver = Cluster(1, 1, max_logprob_bytes=30).driver
    driver.submit("job", make_request(1, sampling=SamplingParams(max_tokens=9, seq_seed=1, logprobs=0)))
    driver.next_batches()
    driver.on_prefill_result(0, prefilled(0, [4], first_logprobs=columns(4)))
    driver.next_batches()
    entry = [(0, [6, 7], FinishCode.NONE)]
    driver.on_decode_result(0, decoded(entry, logprob_sequences=pack([0]), logprobs=(columns(6, 7),)))
    (output,) = driver.take_outputs("job")
    assert output.error is not None
    assert output.error.kind == "logprobs_too_large"
    (outgoing,) = driver.next_batches()
    assert unpack(outgoing.batch.aborted_indexes).tolist() == [0]


def test_higher_priority_starts_first_and_ties_by_age() -> None:
    driver = Cluster(1, 1, num_slots=3, num_blocks=(90, 90)).driver
    for number, priority in enumerate((0, 5, 0, 5)):
        driver.submit("job", make_request(number, priority=priority))
    (outgoing,) = driver.next_batches()
    assert isinstance(outgoing.batch, PrefillBatch)
    assert [request.request_id for request in outgoing.batch.requests] == ["r1", "r3", "r0"]


def echo(driver: BatchScheduler, batches: list[OutgoingBatch]) -> None:
    """Ranks that answer at once: one token by prefill, one by decode."""
    for outgoing in batches:
        batch = outgoing.batch
        if isinstance(batch, PrefillBatch):
            for request in batch.requests:
                driver.on_prefill_result(outgoing.rank, prefilled(request.index, [4]))
        elif batch.admitted:
            entries = [(admitted.request.index, [5], FinishCode.STOP) for admitted in batch.admitted]
            driver.on_decode_result(outgoing.rank, decoded(entries))


@pytest.mark.slow
def test_memory_stays_flat_over_many_short_requests() -> None:
    driver = Cluster(2, 4, num_blocks=(1000, 1000), num_slots=257).driver
    prompt = pack([1, 2, 3])
    sizes = []
    tracemalloc.start()
    for block in range(5):
        for start in range(0, 10_000, 500):
            for number in range(start, start + 500):
                request_id = f"{block}-{number}"
                sampling = SamplingParams(max_tokens=2)
                driver.submit(
                    "job",
                    Request(request_id=request_id, prompt_token_ids=prompt, num_prompt_tokens=3, sampling=sampling),
                )
            while driver.capacity("job") < 1024:
                echo(driver, driver.next_batches())
            assert len(driver.take_outputs("job")) == 500
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] - sizes[0] < 50_000, sizes
    assert driver.counts().num_finished == 50_000
