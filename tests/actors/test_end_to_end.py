"""The tiny model on real ranks: one prefill and two expert-parallel decode ranks, nothing faked."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from deepinfer.llm import LLM
from deepinfer.protocol import SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def llm(local_ray: None, tmp_path_factory: pytest.TempPathFactory):
    settings = {
        "accelerator": "cpu",
        "prefill.ranks": 1,
        "decode.ranks": 2,
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }
    with LLM("tiny", settings=settings) as engine:
        yield engine


def test_answers_do_not_depend_on_what_else_runs(llm: LLM) -> None:
    prompts = [f"Row {number} says" for number in range(20)]
    params = [
        SamplingParams(max_tokens=6 + number % 5, seq_seed=number, temperature=number % 3, logprobs=1)
        for number in range(20)
    ]
    together = llm.generate(prompts, params)
    assert all(out.error is None for out in together)
    assert len({tuple(out.outputs[0].token_ids) for out in together}) > 15
    for number in (0, 7, 19):
        alone = llm.generate(prompts[number], params[number])[0].outputs[0]
        assert alone.token_ids == together[number].outputs[0].token_ids
        assert alone.logprobs == together[number].outputs[0].logprobs


def test_one_request_leaves_the_other_rank_idle(llm: LLM) -> None:
    out = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=1))[0]
    assert len(out.outputs[0].token_ids) == 5
    assert [None if entry is None else len(entry) >= 1 for entry in out.prompt_logprobs] == [None, True, True]


def test_samples_stops_and_streams(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, seq_seed=4)
    samples = llm.generate(["Once upon"], params)[0].outputs
    assert len({tuple(answer.token_ids) for answer in samples}) == 3
    first = samples[0]
    stop_id = first.token_ids[4]
    cut = llm.generate(["Once upon"], SamplingParams(max_tokens=12, seq_seed=4, stop_token_ids=(stop_id,)))[0]
    assert cut.outputs[0].token_ids == first.token_ids[: first.token_ids.index(stop_id) + 1]
    assert cut.outputs[0].finish_reason == "stop"
    pieces = list(llm.stream("Once upon", SamplingParams(max_tokens=12, seq_seed=4)))
    assert "".join(pieces) == first.text


def test_chat_answers_are_read_by_the_chat_format(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is 2 + 2?"}]
    out = llm.chat(conversation, SamplingParams(max_tokens=8, seq_seed=1))[0]
    answer = out.outputs[0]
    assert out.error is None
    assert answer.num_reasoning_tokens > 0
    assert answer.finish_reason == "length"


def test_a_killed_rank_changes_no_answer(llm: LLM) -> None:
    prompts = [f"Row {number} says" for number in range(12)]
    params = [SamplingParams(max_tokens=40, seq_seed=number) for number in range(12)]
    undisturbed = llm.generate(prompts, params)
    victim = next(ready.pid for ready in llm._client.facts.ranks if (ready.role, ready.rank) == ("decode", 1))

    def kill() -> None:
        while llm.status()["requests"]["num_decoding"] < 12:
            time.sleep(0.02)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    disturbed = llm.generate(prompts, params)
    killer.join()
    assert llm.status()["restarts"] == {"prefill": 0, "decode": 1}
    assert [out.error for out in disturbed] == [None] * 12
    assert [out.outputs[0].token_ids for out in disturbed] == [out.outputs[0].token_ids for out in undisturbed]
