"""What else happens to a rank: several samples, log-probabilities, bad numbers, corrupt hand-overs, aborts, faults."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from support.fake_model import VOCAB_SIZE, FakeModel
from support.rank_engines import (
    Answer,
    RunningEngine,
    admission,
    answer_all,
    build_fake_rank,
    make_request,
    run_decode,
    run_prefill,
    wait_until_parked,
)

from deepinfer.codec import pack, unpack, unpack_floats
from deepinfer.errors import RankError
from deepinfer.protocol import DecodeBatch, FinishCode, PrefillBatch

PROMPT = [7, 8, 9, 10, 11]


def _answer(*requests, model: FakeModel | None = None) -> dict[int, Answer]:
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode", model=model)
    return answer_all(prefill.engine, decode.engine, requests)


def test_samples_of_one_prompt_share_its_prefill_and_differ() -> None:
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode")
    answers = answer_all(prefill.engine, decode.engine, [make_request(0, PROMPT, n=3)])
    assert sum(prefill.model.row_counts) == len(PROMPT)
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 3
    assert answers[0].token_ids == _answer(make_request(0, PROMPT))[0].token_ids  # sample 0 has the seed itself


def test_a_request_that_ends_with_its_first_token_is_not_handed_over() -> None:
    prefill = build_fake_rank("prefill")
    with RunningEngine(prefill.engine) as running:
        done, _ = run_prefill(running, [make_request(0, PROMPT, max_tokens=1)], wake_id=1)
    item, buffer = done[0]
    assert (item.kv, buffer) == (None, None)
    assert list(item.finish_codes) == [FinishCode.LENGTH]


def test_logprobs_of_every_token_and_of_the_prompt() -> None:
    request = make_request(0, PROMPT, logprobs=2, prompt_logprobs=1, max_tokens=6)
    prefill, decode = build_fake_rank("prefill", max_tokens_per_step=2), build_fake_rank("decode")
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, [request], wake_id=1)
        item, buffer = done[0]
        answers = {0: Answer(token_ids=unpack(item.first_token_ids).tolist())}
        run_decode(decoding, [(admission(request, item), buffer)], answers, wake_id=1)
    columns = [item.first_logprobs, *answers[0].logprobs]
    assert [count for part in columns for count in unpack(part.counts)] == [3] * 6
    assert [token for part in columns for token in unpack(part.token_ids)[::3]] == answers[0].token_ids
    assert unpack(item.prompt_logprobs.counts).tolist() == [0, 2, 2, 2, 2]
    assert unpack(item.prompt_logprobs.token_ids)[::2].tolist() == PROMPT[1:]
    assert (unpack_floats(item.prompt_logprobs.values) <= 0).all()


def test_a_row_with_bad_numbers_fails_alone_and_its_blocks_serve_others() -> None:
    """P34: from the middle of an answer on."""
    requests = [make_request(place, [place + 1, 5, 9], max_tokens=30) for place in range(4)]
    good = _answer(*requests)
    mentions = [set(good[place].token_ids) for place in range(4)]
    nan_token, victim = next(
        (token, place)
        for place in range(4)
        for token in sorted(mentions[place])
        if sum(token in others for others in mentions) == 1 and good[place].token_ids.index(token) > 2
    )
    with_nan = _answer(*requests, model=FakeModel(nan_token=nan_token))
    assert with_nan[victim].failure.kind == "numerical_error"
    assert with_nan[victim].failure.index == victim
    assert with_nan[victim].token_ids == good[victim].token_ids[: good[victim].token_ids.index(nan_token) + 1]
    for place in set(range(4)) - {victim}:
        assert with_nan[place].token_ids == good[place].token_ids


def test_a_prompt_with_bad_numbers_fails_alone() -> None:
    prefill = build_fake_rank("prefill", model=FakeModel(nan_token=9))
    requests = [make_request(0, [1, 9]), make_request(1, [1, 2]), make_request(2, [9, 2], prompt_logprobs=0)]
    with RunningEngine(prefill.engine) as running:
        done, failures = run_prefill(running, requests, wake_id=1)
    assert done.keys() == {1}
    assert {index: failure.kind for index, failure in failures.items()} == dict.fromkeys((0, 2), "numerical_error")


def test_a_corrupt_hand_over_fails_its_request_and_no_other() -> None:
    requests = [make_request(0, PROMPT), make_request(1, [3, 4])]
    expected = _answer(*requests)
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode")
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, requests, wake_id=1)
        admitted = [(admission(request, done[request.index][0]), done[request.index][1]) for request in requests]
        admitted[0][1][3] ^= 1
        answers = {place: Answer(unpack(done[place][0].first_token_ids).tolist()) for place in (0, 1)}
        run_decode(decoding, admitted, answers, wake_id=1)
    assert answers[0].failure.kind == "kv_corrupt"
    assert answers[0].failure.retryable
    assert "from prefill rank 0 is corrupt" in answers[0].failure.text
    assert answers[1].token_ids == expected[1].token_ids


def test_a_hand_over_of_another_layout_is_refused() -> None:
    request = make_request(0, PROMPT)
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode")
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, [request], wake_id=1)
        entry = admission(request, done[0][0])
        entry = msgspec.structs.replace(entry, kv=msgspec.structs.replace(entry.kv, layout_digest="0" * 16))
        answers = {0: Answer()}
        run_decode(decoding, [(entry, done[0][1])], answers, wake_id=1)
    assert answers[0].failure.kind == "kv_layout_mismatch"


def test_a_read_only_buffer_is_taken() -> None:
    """What comes out of an object store can't be written to."""
    request = make_request(0, PROMPT)
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode")
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, [request], wake_id=1)
        buffer = np.frombuffer(done[0][1].tobytes(), np.uint8)
        assert not buffer.flags.writeable
        answers = {0: Answer(unpack(done[0][0].first_token_ids).tolist())}
        run_decode(decoding, [(admission(request, done[0][0]), buffer)], answers, wake_id=1)
    assert answers[0].token_ids == _answer(request)[0].token_ids


def test_an_aborted_sequence_leaves_room_and_others_go_on() -> None:
    requests = [make_request(0, PROMPT, max_tokens=200), make_request(1, [3, 4], max_tokens=40)]
    expected = _answer(requests[1])
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode", model=FakeModel(step_seconds=0.002))
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, requests, wake_id=1)
        admitted = [(admission(request, done[request.index][0]), done[request.index][1]) for request in requests]
        decode.engine.post(DecodeBatch(batch_id=1, wake_id=1, admitted=(admitted[0][0],)), [admitted[0][1]])
        decoding.next_results()
        decode.engine.post(DecodeBatch(batch_id=2, wake_id=2, aborted_indexes=pack([0])))
        answers = {0: Answer(), 1: Answer(unpack(done[1][0].first_token_ids).tolist())}
        run_decode(decoding, admitted[1:], answers, wake_id=3)
        wait_until_parked(decoding)
        assert decode.scheduler.load().num_free_blocks == {"global": 199}
    assert answers[1].token_ids == expected[1].token_ids
    assert len(answers[0].token_ids) < 199


def test_a_new_driver_has_all_earlier_work_dropped_without_a_result() -> None:
    requests = [make_request(place, PROMPT, max_tokens=200) for place in range(12)]  # more than there are slots
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode", model=FakeModel(step_seconds=0.002))
    with RunningEngine(prefill.engine) as prefilling, RunningEngine(decode.engine) as decoding:
        done, _ = run_prefill(prefilling, requests, wake_id=1)
        admitted = tuple(admission(request, done[request.index][0]) for request in requests)
        buffers = [done[request.index][1] for request in requests]
        decode.engine.post(DecodeBatch(batch_id=1, wake_id=1, admitted=admitted), buffers)
        decoding.next_results()
        decode.engine.post(DecodeBatch(batch_id=0, wake_id=2, drops_all=True))
        wait_until_parked(decoding)
        decode.engine.take_results()
        load = decode.scheduler.load()
        assert (load.num_waiting, load.num_running, load.num_free_blocks) == (0, 0, {"global": 199})
        done, _ = run_prefill(prefilling, [make_request(50, [3, 4], max_tokens=40)], wake_id=2)
        again = make_request(50, [3, 4], max_tokens=40)
        answers = {50: Answer(unpack(done[50][0].first_token_ids).tolist())}
        run_decode(decoding, [(admission(again, done[50][0]), done[50][1])], answers, wake_id=3)
    assert answers[50].token_ids == _answer(make_request(50, [3, 4], max_tokens=40))[50].token_ids


def test_a_prompt_too_long_for_the_cache_is_a_failure_and_the_rank_parks() -> None:
    prefill = build_fake_rank("prefill", num_blocks=1 + 4, max_model_len=200)
    with RunningEngine(prefill.engine) as running:
        _, failures = run_prefill(running, [make_request(0, [1] * 50)], wake_id=1)
        wait_until_parked(running)
    assert failures[0].kind == "cache_too_small"


def test_a_parked_rank_runs_nothing_until_it_is_woken() -> None:
    decode = build_fake_rank("decode")
    with RunningEngine(decode.engine) as running:
        wait_until_parked(running)
        decode.engine.post(DecodeBatch(batch_id=1, wake_id=1))
        while decode.engine.status()["wake_id"] < 1:
            time.sleep(0.001)
        wait_until_parked(running)
    assert decode.model.row_counts == []


def test_what_breaks_a_step_names_rank_and_step() -> None:
    prefill = build_fake_rank("prefill")
    prefill.model.forward = lambda inputs: 1 // 0
    running = RunningEngine(prefill.engine)
    with pytest.raises(RankError, match=r"prefill rank 0: step \d+ broke: ZeroDivisionError"), running:
        run_prefill(running, [make_request(0, PROMPT)], wake_id=1)


def test_metrics_count_tokens_blocks_and_transfers() -> None:
    prefill, decode = build_fake_rank("prefill"), build_fake_rank("decode")
    answers = answer_all(prefill.engine, decode.engine, [make_request(0, PROMPT, max_tokens=9)])
    assert len(answers[0].token_ids) == 9
    assert prefill.recorder.get("deepinfer_prompt_tokens") == len(PROMPT)
    assert prefill.recorder.get("deepinfer_generated_tokens") + decode.recorder.get("deepinfer_generated_tokens") == 9
    num_bytes = prefill.recorder.get("deepinfer_kv_transfer_bytes")
    assert num_bytes == decode.recorder.get("deepinfer_kv_transfer_bytes") == 8 * (len(PROMPT) + 8)
    assert decode.recorder.get("deepinfer_kv_blocks_total", {"group": "global"}) == 199
    assert 0.0 <= decode.recorder.get("deepinfer_device_idle_share") < 1.0
    assert max(answers[0].token_ids) < VOCAB_SIZE


def test_a_prefill_wakes_without_requests() -> None:
    prefill = build_fake_rank("prefill")
    with RunningEngine(prefill.engine) as running:
        prefill.engine.post(PrefillBatch(batch_id=1, wake_id=1))
        while prefill.engine.status()["wake_id"] < 1:
            time.sleep(0.001)
        wait_until_parked(running)
    assert prefill.engine.take_results() == (None, [])
