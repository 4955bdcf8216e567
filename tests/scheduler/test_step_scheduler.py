"""The step scheduler over a device whose tokens depend on every cached token, so wrong books draw wrong tokens."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec import pack, unpack
from deepinfer.kv_cache.cache_manager import CacheManager
from deepinfer.protocol import AdmittedRequest, FinishCode, KVHandle, LogprobColumns, Request, SamplingParams
from deepinfer.scheduler.step_plan import SlotOutput, StepOutput, StepPlan
from deepinfer.scheduler.step_results import StepResults
from deepinfer.scheduler.step_scheduler import StepScheduler
from tests.support.fake_device import EOS, GROUPS, FakeDevice, draw_token, expected_output
from tests.support.fake_rank import stop_checkers

MAX_MODEL_LEN = 60


def make_request(index: int, num_prompt_tokens: int, max_tokens: int, **changes: object) -> Request:
    rng = random.Random(index)
    sampling = changes.pop("sampling", SamplingParams(max_tokens=max_tokens, seq_seed=index))
    return Request(
        request_id=f"r{index}",
        index=index,
        prompt_token_ids=pack([rng.randrange(1, 40) for _ in range(num_prompt_tokens)]),
        num_prompt_tokens=num_prompt_tokens,
        sampling=sampling,
        **changes,
    )


def hand_over(request: Request, output: list[int]) -> tuple[AdmittedRequest, dict[str, np.ndarray]]:
    """What a prefill rank would hand over for `request` with `output` so far (at least the first token)."""
    earlier = output[:-1]
    request = Request(
        **{f: getattr(request, f) for f in request.__struct_fields__} | {"output_token_ids": pack(earlier)}
    )
    history = np.concatenate((unpack(request.prompt_token_ids), np.array(earlier, np.int32))).astype(np.int64)
    handle = KVHandle(
        request_id=request.request_id,
        source_rank=0,
        num_tokens=len(history),
        layout_digest="test",
        groups=(),
        nbytes=0,
        checksum=0,
    )
    admitted = AdmittedRequest(request=request, sample_offsets=pack([0]), first_token_ids=pack(output[-1:]), kv=handle)
    return admitted, {"main": history, "index": history}


class Loop:
    """A rank loop whose order of launches and results the test chooses."""

    def __init__(
        self,
        role: str,
        *,
        blocks: tuple[int, int] = (200, 200),
        num_slots: int = 6,
        max_running: int | None = None,
        max_tokens_per_step: int = 8,
        max_rows: int = 1,
        num_commits=lambda length: 1,
        fails=lambda token_id: False,
    ) -> None:
        num_blocks = {"main": blocks[0], "index": blocks[1]}
        self.cache = CacheManager(GROUPS, num_blocks=num_blocks, num_slots=num_slots)
        self.scheduler = StepScheduler(
            role=role,
            cache=self.cache,
            max_running=max_running or num_slots - 1,
            max_tokens_per_step=max_tokens_per_step,
            max_model_len=MAX_MODEL_LEN,
            make_stop_checker=stop_checkers(MAX_MODEL_LEN),
            max_rows_per_slot=max_rows,
        )
        self.device = FakeDevice(
            num_blocks=num_blocks,
            num_slots=num_slots,
            max_model_len=MAX_MODEL_LEN,
            num_commits=num_commits,
            fails=fails,
        )
        self.in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        self.step_id = 0

    def launch(self) -> StepPlan:
        for entry in self.scheduler.next_imports():
            self.device.scatter(entry.block_ids, entry.buffer)
        plan = self.scheduler.plan(self.step_id)
        self.step_id += 1
        self.in_flight.append((plan, self.device.run(plan)))
        self.scheduler.check_integrity()
        return plan

    def read(self) -> StepResults:
        results = self.scheduler.apply(*self.in_flight.popleft())
        self.scheduler.check_integrity()
        return results

    def run_until_idle(self, depth: int = 2, max_steps: int = 500) -> list[StepResults]:
        all_results = []
        while self.scheduler.has_work():
            assert self.step_id < max_steps, "the scheduler makes no progress"
            self.launch()
            while len(self.in_flight) >= depth or (self.in_flight and not self.scheduler.has_work()):
                all_results.append(self.read())
            for results in all_results[-1:]:
                for prefilled in results.prefilled:
                    if prefilled.needs_export:
                        self.scheduler.exported(prefilled.request.index)
        while self.in_flight:
            assert self.in_flight[0][0].is_idle
            all_results.append(self.read())
        self.scheduler.check_integrity()
        assert self.cache.num_sequences == 0
        return all_results


# Prefill


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    budget=st.integers(1, 64),
    depth=st.integers(1, 2),
    blocks=st.tuples(st.integers(14, 40), st.integers(10, 30)),
    num_samples=st.integers(1, 3),
)
def test_prefill_fills_the_budget_in_order_and_draws_the_right_tokens(
    lengths: list[int], budget: int, depth: int, blocks: tuple[int, int], num_samples: int
) -> None:
    loop = Loop("prefill", blocks=blocks, max_tokens_per_step=budget, num_slots=4)
    requests = [make_request(10 * i, n, 5, num_samples=num_samples) for i, n in enumerate(lengths)]
    for request in requests:
        loop.scheduler.add(request)
    plans: list[StepPlan] = []
    launch = loop.launch
    loop.launch = lambda: plans.append(launch()) or plans[-1]  # type: ignore[method-assign]
    done = [prefilled for results in loop.run_until_idle(depth) for prefilled in results.prefilled]
    assert [prefilled.request.request_id for prefilled in done] == [request.request_id for request in requests]
    for prefilled in done:
        prompt = unpack(prefilled.request.prompt_token_ids)
        expected = [draw_token(prompt, prefilled.request.sampling, sample) for sample in range(num_samples)]
        assert list(prefilled.first_token_ids) == expected
        codes = [FinishCode.STOP if token_id == EOS else FinishCode.NONE for token_id in expected]
        assert list(prefilled.finish_codes) == codes
        assert prefilled.needs_export == (FinishCode.NONE in codes)
    assert all(plan.num_rows <= budget for plan in plans)
    assert sum(plan.num_rows for plan in plans) == sum(lengths)
    for plan in plans:  # a chunk that ends before its prompt ends because the budget is spent
        assert all(chunk.samples or plan.num_rows == budget for chunk in plan.chunks)


def test_a_step_takes_several_prompts_and_the_next_goes_on() -> None:
    loop = Loop("prefill", max_tokens_per_step=10)
    for index, length in enumerate((4, 12, 3)):
        loop.scheduler.add(make_request(index, length, 5))
    shapes = [[(c.start_position, c.num_tokens, c.samples) for c in loop.launch().chunks] for _ in range(3)]
    assert shapes == [[(0, 4, True), (0, 6, False)], [(6, 6, True), (0, 3, True)], []]


def test_a_prompt_that_never_fits_fails_and_the_next_runs() -> None:
    loop = Loop("prefill", blocks=(6, 100))
    loop.scheduler.add(make_request(0, 21, 5))
    loop.scheduler.add(make_request(1, MAX_MODEL_LEN, 5))
    loop.scheduler.add(make_request(2, 20, 5))
    results = loop.run_until_idle()
    assert [(f.request_id, f.kind) for r in results for f in r.failures] == [
        ("r0", "cache_too_small"),
        ("r1", "context_length_exceeded"),
    ]
    assert [p.request.request_id for r in results for p in r.prefilled] == ["r2"]


def test_slot_and_blocks_stay_until_the_export_is_done() -> None:
    loop = Loop("prefill", num_slots=2)
    for index in (1, 2):
        loop.scheduler.add(make_request(index, 3, 5))
    loop.launch()
    (prefilled,) = loop.read().prefilled
    assert prefilled.needs_export
    loop.scheduler.abort([1])  # too late: the gather is running
    assert loop.launch().is_idle
    assert loop.scheduler.has_work()
    loop.scheduler.exported(1)
    assert not loop.launch().is_idle


def test_a_request_that_ends_with_its_first_token_is_not_exported() -> None:
    loop = Loop("prefill")
    loop.scheduler.add(make_request(1, 3, 1))
    (prefilled,) = (p for r in loop.run_until_idle() for p in r.prefilled)
    assert (prefilled.finish_codes, prefilled.needs_export) == ((FinishCode.LENGTH,), False)


def test_abort_between_chunks_frees_after_the_last_step_in_flight() -> None:
    loop = Loop("prefill", max_tokens_per_step=4)
    loop.scheduler.add(make_request(1, 12, 5))
    loop.launch()
    loop.launch()
    loop.scheduler.abort([1])
    assert loop.launch().is_idle
    loop.read()
    assert loop.cache.num_sequences == 1
    loop.read()
    assert loop.cache.num_sequences == 0
    assert loop.read().prefilled == ()


def test_a_replay_runs_prompt_and_output_and_counts_the_output() -> None:
    request = make_request(3, 7, 3)
    output = expected_output(request, 0, MAX_MODEL_LEN)
    assert len(output) == 3
    loop = Loop("prefill")
    loop.scheduler.add(make_request(3, 7, 3, output_token_ids=pack(output[:2])))
    (prefilled,) = (p for r in loop.run_until_idle() for p in r.prefilled)
    assert (prefilled.num_tokens, prefilled.first_token_ids) == (9, (output[2],))
    assert prefilled.finish_codes == (FinishCode.LENGTH,)


def columns(values: list[float]) -> LogprobColumns:
    return LogprobColumns(
        counts=pack([1] * len(values)),
        token_ids=pack([int(v) for v in values]),
        values=np.array(values, "<f4").tobytes(),
    )


def test_prompt_logprobs_of_chunks_are_joined_and_cut_to_the_prompt() -> None:
    loop = Loop("prefill", max_tokens_per_step=3)
    sampling = SamplingParams(max_tokens=9, seq_seed=1, prompt_logprobs=0)
    loop.scheduler.add(make_request(1, 5, 9, sampling=sampling, output_token_ids=pack([7, 8])))
    for _ in range(4):
        plan = loop.launch()
        for chunk in plan.chunks:
            after = range(chunk.start_position + 1, min(chunk.start_position + chunk.num_tokens + 1, 7))
            loop.in_flight[-1][1].prompt_logprobs[chunk.slot] = columns([float(t) for t in after])
    (prefilled,) = (p for _ in range(4) for p in loop.read().prefilled)
    assert prefilled.prompt_logprobs is not None
    assert unpack(prefilled.prompt_logprobs.counts).tolist() == [0, 1, 1, 1, 1]
    assert unpack(prefilled.prompt_logprobs.token_ids).tolist() == [1, 2, 3, 4]


# Decode


def outputs_of(all_results: list[StepResults]) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}
    for results in all_results:
        for entry in results.decoded:
            outputs.setdefault(entry.index, []).extend(entry.token_ids)
    return outputs


def test_the_device_leads_and_a_finished_sequence_costs_at_most_one_row() -> None:
    request = next(
        r for r in (make_request(i, 5, 40) for i in range(99)) if 3 < len(expected_output(r, 0, MAX_MODEL_LEN)) < 20
    )
    expected = expected_output(request, 0, MAX_MODEL_LEN)
    loop = Loop("decode")
    loop.scheduler.admit(*hand_over(request, expected[:1]))
    results = loop.run_until_idle()
    assert expected[1:] == outputs_of(results)[request.index]
    assert [e.finish for r in results for e in r.decoded][-1] is FinishCode.STOP
    assert loop.device.num_rows == len(expected) - 1 + 1


def test_a_sure_end_is_not_scheduled_again() -> None:
    request = next(r for r in (make_request(i, 5, 6) for i in range(99)) if EOS not in expected_output(r, 0, 60))
    expected = expected_output(request, 0, MAX_MODEL_LEN)
    loop = Loop("decode")
    loop.scheduler.admit(*hand_over(request, expected[:1]))
    plans = [loop.launch() for _ in range(8)]
    assert [len(plan.decode_slots) for plan in plans] == [1] * 5 + [0] * 3
    assert outputs_of([loop.read() for _ in range(8)])[request.index] == expected[1:]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_decode_against_the_cacheless_model(data: st.DataObject) -> None:
    """Random lengths, caches, commits of 1..6 tokens and orders; preempted sequences come back as replays."""
    max_rows = data.draw(st.sampled_from([1, 1, 2, 6]))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    blocks = (data.draw(st.integers(17, 40)), data.draw(st.integers(12, 30)))
    loop = Loop(
        "decode",
        blocks=blocks,
        num_slots=data.draw(st.integers(2, 7)),
        max_rows=max_rows,
        num_commits=lambda length: rng.randint(1, 6),
    )
    requests = {
        i: make_request(i, rng.randint(1, 30), rng.randint(2, 40)) for i in range(data.draw(st.integers(1, 10)))
    }
    expected = {i: expected_output(request, 0, MAX_MODEL_LEN) for i, request in requests.items()}
    requests = {i: request for i, request in requests.items() if len(expected[i]) > 1}
    outputs = {i: expected[i][:1] for i in requests}
    open_indexes, to_admit = set(requests), list(requests)
    aborted: set[int] = set()
    while open_indexes or loop.scheduler.has_work():
        assert loop.step_id < 3000, "the scheduler makes no progress"
        while to_admit and rng.random() < 0.5:
            index = to_admit.pop(0)
            loop.scheduler.admit(*hand_over(requests[index], outputs[index]))
        if rng.random() < 0.01 and open_indexes:
            index = rng.choice(sorted(open_indexes))
            loop.scheduler.abort([index])
            aborted.add(index)
            open_indexes.discard(index)
            to_admit = [i for i in to_admit if i != index]
        if len(loop.in_flight) < 2 and rng.random() < 0.7:
            loop.launch()
        elif loop.in_flight:
            results = loop.read()
            assert results.failures == ()
            for entry in results.decoded:
                assert entry.index in open_indexes
                outputs[entry.index] += entry.token_ids
                if entry.finish is FinishCode.PREEMPTED:
                    to_admit.append(entry.index)
                elif entry.finish is not FinishCode.NONE:
                    open_indexes.discard(entry.index)
    assert loop.cache.num_sequences == 0
    for index in requests.keys() - aborted:
        assert outputs[index] == expected[index]


def test_the_newest_sequence_is_preempted_after_its_results_were_sent() -> None:
    requests = [r for r in (make_request(i, 8, 30) for i in range(200)) if len(expected_output(r, 0, 60)) > 20][:2]
    loop = Loop("decode", blocks=(8, 100))  # 28 tokens: both start, one can go on
    for request in reversed(requests):
        loop.scheduler.admit(*hand_over(request, expected_output(request, 0, 60)[:1]))
    results = []
    while not any(entry.finish is FinishCode.PREEMPTED for r in results for entry in r.decoded):
        assert loop.step_id < 50, "nothing was preempted"
        loop.launch()
        if len(loop.in_flight) == 2:
            results.append(loop.read())
    preempted = [entry for r in results for entry in r.decoded if entry.finish is FinishCode.PREEMPTED]
    assert [entry.index for entry in preempted] == [requests[1].index]
    sent = outputs_of(results)
    for request in requests:
        whole = expected_output(request, 0, 60)
        assert whole[1 : 1 + len(sent[request.index])] == sent[request.index]
    rows_of_newest = sum(1 for r in results for e in r.decoded if e.index == requests[1].index and e.token_ids)
    assert rows_of_newest == len(sent[requests[1].index]), "a step in flight was lost"


def test_a_cut_sequence_keeps_the_blocks_that_its_wasted_rows_write_to() -> None:
    """The device went on behind the stop token, so the host's count of that sequence says too little."""
    loop = Loop("decode", blocks=(10, 100), max_rows=6)
    cut, other = make_request(1, 3, 50), make_request(2, 3, 50)
    for request in (cut, other):
        loop.scheduler.admit(*hand_over(request, [3]))
    loop.scheduler.next_imports()
    plans = [loop.scheduler.plan(step_id) for step_id in range(2)]
    slots = plans[0].decode_slots.tolist()
    tokens = ([5, EOS, 5, 5, 5, 5], [5] * 6)
    outputs = tuple(SlotOutput(slot, np.array(run, np.int32)) for slot, run in zip(slots, tokens, strict=True))
    results = loop.scheduler.apply(plans[0], StepOutput(0, outputs))
    assert [entry.finish for entry in results.decoded] == [FinishCode.STOP, FinishCode.NONE]
    assert loop.scheduler.plan(2).is_idle  # the other one waits for the blocks of the one that was cut
    assert len(loop.cache.block_table(cut.index, 100)["main"]) == 4
    outputs = tuple(SlotOutput(slot, np.array([5], np.int32)) for slot in slots)
    loop.scheduler.apply(plans[1], StepOutput(1, outputs))
    loop.scheduler.apply(StepPlan(2), StepOutput(2))
    assert loop.scheduler.plan(3).decode_slots.tolist() == slots[1:]


def test_a_sequence_alone_that_outgrows_the_cache_fails() -> None:
    request = next(r for r in (make_request(i, 8, 40) for i in range(200)) if len(expected_output(r, 0, 60)) > 30)
    loop = Loop("decode", blocks=(6, 100))
    loop.scheduler.admit(*hand_over(request, expected_output(request, 0, 60)[:1]))
    results = loop.run_until_idle()
    assert [f.kind for r in results for f in r.failures] == ["cache_too_small"]
    assert len(outputs_of(results)[request.index]) == 20 - 8  # 20 cached tokens and one more known


def test_what_is_longer_than_the_cache_is_refused_on_admission() -> None:
    request = make_request(1, 30, 20)
    loop = Loop("decode", blocks=(6, 100))
    loop.scheduler.admit(*hand_over(request, [3]))
    assert [f.kind for r in loop.run_until_idle() for f in r.failures] == ["cache_too_small"]


def test_a_bad_row_fails_only_its_sequence() -> None:
    good, bad = (
        next(r for r in (make_request(i, 5, 12) for i in range(999)) if (7 in expected_output(r, 0, 60)[2:]) == flag)
        for flag in (False, True)
    )
    loop = Loop("decode", fails=lambda token_id: token_id == 7)
    for request in (good, bad):
        loop.scheduler.admit(*hand_over(request, expected_output(request, 0, 60)[:1]))
    results = loop.run_until_idle()
    assert [(f.index, f.kind) for r in results for f in r.failures] == [(bad.index, "numerical_error")]
    assert outputs_of(results)[good.index] == expected_output(good, 0, 60)[1:]


def test_a_placed_sequence_can_fail_before_it_ran() -> None:
    loop = Loop("decode")
    for index in (1, 2):
        loop.scheduler.admit(*hand_over(make_request(index, 5, 12), [3]))
    first, _second = loop.scheduler.next_imports()
    loop.scheduler.fail_slot(first.slot, "grammar_error", "no token is allowed")
    plan = loop.scheduler.plan(0)
    assert [admission.num_prompt_tokens for admission in plan.admissions] == [5]
    assert len(plan.decode_slots) == 1
    results = loop.scheduler.apply(plan, StepOutput(0, (SlotOutput(plan.decode_slots[0], np.array([4], np.int32)),)))
    assert [(f.index, f.kind) for f in results.failures] == [(1, "grammar_error")]
    assert [entry.index for entry in results.decoded] == [2]


def test_logprobs_are_cut_with_the_tokens() -> None:
    loop = Loop("decode", max_rows=4)
    request = make_request(1, 5, 3)
    loop.scheduler.admit(*hand_over(request, [3]))
    loop.scheduler.next_imports()
    plan = loop.scheduler.plan(0)
    output = SlotOutput(int(plan.decode_slots[0]), np.array([4, 5, 6, 7], np.int32), logprobs=columns([1, 2, 3, 4]))
    (entry,) = loop.scheduler.apply(plan, StepOutput(0, (output,))).decoded
    assert (entry.token_ids, entry.finish) == ((4, 5), FinishCode.LENGTH)
    assert entry.logprobs is not None
    assert unpack(entry.logprobs.token_ids).tolist() == [1, 2]


def test_max_running_holds_back_the_ready_queue() -> None:
    loop = Loop("decode", num_slots=9, max_running=3)
    for index in range(5):
        loop.scheduler.admit(*hand_over(make_request(index, 5, 12), [3]))
    assert len(loop.scheduler.next_imports()) == 3
    load = loop.scheduler.load()
    assert (load.num_waiting, load.num_running) == (2, 3)


def test_results_are_applied_in_order() -> None:
    loop = Loop("decode")
    plans = [loop.scheduler.plan(step_id) for step_id in range(2)]
    with pytest.raises(AssertionError, match="oldest"):
        loop.scheduler.apply(plans[1], StepOutput(1))
