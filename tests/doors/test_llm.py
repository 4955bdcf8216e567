"""`LLM` over fake ranks on a Ray of its own: one engine for the whole file, started and stopped like a user's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
import ray
from support.fake_cluster import FAKE_PROGRAM, TESTS, environment
from support.fake_engine import FAULT, Fault, expected_tokens

from deepinfer.config import ClusterConfig
from deepinfer.errors import CheckpointError, ClusterError, ConfigError, RequestError
from deepinfer.llm import LLM
from deepinfer.outputs import Row
from deepinfer.protocol import SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

SETTINGS = {
    "accelerator": "cpu",
    "prefill.ranks": 1,
    "decode.ranks": 2,
    "ray.object_store_bytes": 120 << 20,
    "scheduler.placement_timeout_seconds": 5,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    with environment({"PYTHONPATH": str(TESTS)}):
        yield {**SETTINGS, "cache_dir": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def llm(settings: dict[str, object]) -> Iterator[LLM]:
    had_ray = ray.is_initialized()  # of other tests in this process
    with LLM("tiny", settings=settings, rank_program=FAKE_PROGRAM) as engine:
        yield engine
    assert ray.is_initialized() == had_ray
    with pytest.raises(ClusterError, match="closed"):
        engine.generate("x")
    engine.close()


def test_answers_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[1, place] for place in range(100)]
    params = [SamplingParams(max_tokens=1 + place % 9) for place in range(100)]
    outs = llm.generate(prompts, params)
    for place, out in enumerate(outs):
        assert out.error is None
        assert out.prompt_token_ids == prompts[place]
        assert out.outputs[0].token_ids == expected_tokens(prompts[place], 0, 0, 1 + place % 9)
        assert out.outputs[0].finish_reason == "length"
        assert out.outputs[0].text == llm.tokenizer.decode(out.outputs[0].token_ids)
        assert out.seed is not None
    assert len({out.request_id for out in outs}) == 100


def test_one_prompt_may_stand_alone(llm: LLM) -> None:
    assert [out.prompt for out in llm.generate("Hello")] == ["Hello"]
    assert [out.prompt_token_ids for out in llm.generate([1, 5, 7])] == [[1, 5, 7]]
    outs = llm.generate(["", [3]], SamplingParams(n=2, max_tokens=3))
    assert outs[0].prompt_token_ids == [llm.tokenizer.bos_token_id]
    assert [answer.token_ids for answer in outs[1].outputs] == [expected_tokens([3], sample, 0, 3) for sample in (0, 1)]
    assert llm.generate([]) == []


def test_failed_requests_say_why_and_leave_the_others_alone(llm: LLM) -> None:
    outs = llm.generate([[1, 2], [], [FAULT, Fault.FAIL_REQUEST], [1, 10**6], "fine"])
    assert [out.error is None for out in outs] == [True, False, False, False, True]
    assert outs[1].error.param == "prompt"
    assert (outs[2].error.code, str(outs[2].error)) == ("numerics", "NaN in the fake logits")
    assert outs[3].error.param == "prompt[1]"
    with pytest.raises(RequestError, match="there are 1 for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    single = llm.chat(conversation, SamplingParams(max_tokens=4), thinking=False)
    both = llm.chat([conversation, [{"role": "ghost", "content": "boo"}]], SamplingParams(max_tokens=4), thinking=False)
    assert len(single) == 1
    assert both[0].outputs[0].token_ids == single[0].outputs[0].token_ids
    assert "ghost" in str(both[1].error)
    thinking = llm.chat(conversation, SamplingParams(max_tokens=4))[0].outputs[0]
    assert (thinking.text, thinking.num_reasoning_tokens) == ("", 4)
    assert thinking.reasoning


def test_streamed_pieces_joined_are_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=300, skip_special_tokens=False)
    pieces = list(llm.stream([4, 4], params))
    assert len(pieces) > 1
    assert "".join(pieces) == llm.generate([[4, 4]], params)[0].outputs[0].text
    with pytest.raises(RequestError, match="n: a streamed answer has one sample"):
        next(llm.stream("x", SamplingParams(n=2)))
    with pytest.raises(RequestError, match="NaN"):
        list(llm.stream([FAULT, Fault.FAIL_REQUEST]))


def test_rows_of_an_endless_source_come_back_with_their_tags(llm: LLM) -> None:
    pulled = 0

    def rows() -> Iterator[object]:
        nonlocal pulled
        for place in count():
            pulled += 1
            yield {"prompt": [2, place % 250], "tag": f"row-{place}", "params": SamplingParams(max_tokens=2)}

    answers = llm.generate_iter(rows(), max_in_flight=16)
    for out in islice(answers, 300):
        place = int(out.tag.removeprefix("row-"))
        assert out.outputs[0].token_ids == expected_tokens([2, place % 250], 0, 0, 2)
    answers.close()
    assert pulled <= 300 + 16
    with pytest.raises(RequestError, match="promt: unknown field; known: prompt, messages"):
        list(llm.generate_iter([{"promt": "x"}]))
    with pytest.raises(ConfigError, match=r"must lie in 1 \.\. 1024"):
        llm.run_rows([], max_in_flight=5000)


def test_results_of_rows_say_where_they_ran(llm: LLM) -> None:
    results = list(llm.run_rows(Row(tag=-tag, prompt=[tag]) for tag in range(1, 40)))
    assert sorted(result.tag for result in results) == list(range(-39, 0))
    assert {result.decode_rank for result in results} == {0, 1}
    assert {result.prefill_rank for result in results} == {0}
    assert all(result.seconds > 0 for result in results)


def test_threads_share_an_engine(llm: LLM) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        prompts = [[number + 1, place] for place in range(30)]
        for prompt, out in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=8)), strict=True):
            if out.outputs[0].token_ids != expected_tokens(prompt, 0, 0, 8):
                wrong.append(prompt)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_status_is_plain(llm: LLM) -> None:
    status = llm.status()
    assert status["state"] == "ready"
    assert set(status["loads"]) <= {"prefill-0", "decode-0", "decode-1"}


def test_failed_starts_leave_the_process_as_it_was(llm: LLM, settings: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode\.rank"):
        LLM("tiny", settings={**settings, "decode.rank": 3})
    with pytest.raises(ConfigError, match="beside a ClusterConfig"):
        LLM("tiny", ClusterConfig(), settings=settings)
    with pytest.raises(CheckpointError, match="tokenizer"):
        LLM(str(tmp_path), settings=settings)
    # Beside the running engine one role may find a place or neither.
    with pytest.raises(ConfigError, match=r"ask(ed)? for 9[01] CPU, (free are \d+ of \d+ CPU|all nodes together have)"):
        LLM("tiny", settings={**settings, "decode.ranks": 90}, rank_program=FAKE_PROGRAM)
    assert llm.generate([[1]], SamplingParams(max_tokens=1))[0].error is None
