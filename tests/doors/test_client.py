"""The client without Ray: what rows become, what is refused, and that a run is lazy, bounded and complete."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from deepinfer.client import RequestMaker, Run
from deepinfer.client.assembling import OpenRequest
from deepinfer.codec import pack, pack_floats, unpack
from deepinfer.errors import ClusterError, RequestError
from deepinfer.models.deepseek_v41.tiny import tiny_directory
from deepinfer.outputs import ChatOptions, Row
from deepinfer.protocol import (
    FinishCode,
    LogprobColumns,
    OutputBatch,
    Request,
    RequestFailure,
    RequestOutput,
    SamplingParams,
)
from deepinfer.tokenizer import Tokenizer

MAX_LEN = 128


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(tiny_directory(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def maker(tokenizer: Tokenizer) -> RequestMaker:
    return RequestMaker(tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=MAX_LEN, max_logprob_bytes=10_000)


class EchoJob:
    """A driver that answers each request with its prompt, in reverse order of arrival."""

    job_id = "job"

    def __init__(self, *, failing: bool = False) -> None:
        self.waiting: deque[Request] = deque()
        self.most_in_flight = 0
        self.is_closed = False
        self.failing = failing
        self.lock = threading.Lock()

    def submit(self, requests: list[Request]) -> None:
        with self.lock:
            self.waiting += requests
            self.most_in_flight = max(self.most_in_flight, len(self.waiting))

    def next_outputs(self, wait_seconds: float) -> OutputBatch:
        if self.failing:
            raise ClusterError("the engine is on fire")
        time.sleep(0.001)
        with self.lock:
            outputs = tuple(echo(request) for request in reversed(self.waiting))
            self.waiting.clear()
        return OutputBatch(outputs=outputs, num_generated=2 * len(outputs))

    def close(self) -> None:
        self.is_closed = True


class EchoClient:
    def __init__(self, **options: bool) -> None:
        self.job = EchoJob(**options)

    def open_job(self) -> EchoJob:
        return self.job


def echo(request: Request) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id, token_ids=request.prompt_token_ids, finish=FinishCode.LENGTH, seed=5
    )


def run(maker: RequestMaker, rows: object, *, max_in_flight: int = 8, **options: bool) -> tuple[Run, EchoJob]:
    client = EchoClient(**options)
    return Run(client, maker, rows, max_in_flight=max_in_flight), client.job  # type: ignore[arg-type]


def rows_of(count: int) -> Iterator[Row]:
    return (Row(tag=tag, prompt=[1 + tag % 50, 2]) for tag in range(count))


class TestPreparing:
    def test_text_gets_bos_and_ids_are_taken_as_they_are(self, maker: RequestMaker, tokenizer: Tokenizer) -> None:
        prepared = maker.prepare(Row(tag=0, prompt="Hello"), "x")
        assert prepared.prompt_token_ids == [tokenizer.bos_token_id, *tokenizer.encode_text("Hello")]
        assert maker.prepare(Row(tag=0, prompt=""), "x").prompt_token_ids == [tokenizer.bos_token_id]
        prepared = maker.prepare(Row(tag=0, prompt=[7, 8], params=SamplingParams(n=3)), "x")
        assert unpack(prepared.request.prompt_token_ids).tolist() == [7, 8]
        assert (prepared.request.num_prompt_tokens, prepared.request.num_samples) == (2, 3)

    def test_a_chat_carries_its_format(self, maker: RequestMaker) -> None:
        row = Row(tag=0, messages=[{"role": "user", "content": "hi"}], chat=ChatOptions(thinking=True))
        prepared = maker.prepare(row, "x")
        assert prepared.request.output_format.kind == "chat"
        assert prepared.request.output_format.in_reasoning

    @pytest.mark.parametrize(
        ("row", "param", "text"),
        [
            (Row(tag=0), "prompt", "must be a text or a list"),
            (Row(tag=0, prompt=[]), "prompt", "at least one token id"),
            (Row(tag=0, prompt=[1, 99999]), "prompt[1]", "must be a token id from 0"),
            (Row(tag=0, prompt=[True]), "prompt[0]", "must be a token id"),
            (Row(tag=0, prompt=[1] * MAX_LEN), "prompt", "the context is 128 tokens long"),
            (Row(tag=0, prompt=[1], messages=[{}]), "messages", "not both"),
            (Row(tag=0, messages=[]), "messages", "messages"),
            (Row(tag=0, prompt=[1], params=SamplingParams(top_p=2.0)), "top_p", "2.0"),
            (Row(tag=0, prompt=[1], params=SamplingParams(logprobs=-1)), "logprobs", "10000 are allowed"),
        ],
    )
    def test_refusals_name_the_field(self, maker: RequestMaker, row: Row, param: str, text: str) -> None:
        with pytest.raises(RequestError, match=text) as caught:
            maker.prepare(row, "x")
        assert caught.value.param == param

    def test_max_tokens_ends_at_the_context(self, maker: RequestMaker) -> None:
        row = Row(tag=0, prompt=[1] * 124, params=SamplingParams(max_tokens=100, min_tokens=4))
        params = maker.prepare(row, "x").request.sampling
        assert (params.max_tokens, params.min_tokens) == (4, 4)
        row = Row(tag=0, prompt=[1] * 124, params=SamplingParams(max_tokens=100, min_tokens=5))
        with pytest.raises(RequestError, match=r"min_tokens: 5 do not fit .* use at most 4") as caught:
            maker.prepare(row, "x")
        assert caught.value.param == "min_tokens"

    def test_the_row_s_name_travels_for_log_lines(self, maker: RequestMaker) -> None:
        assert maker.prepare(Row(tag=0, prompt="a", label="story-1"), "x").request.label == "story-1"


class TestRun:
    def test_every_row_has_one_result(self, maker: RequestMaker) -> None:
        runner, job = run(maker, rows_of(500))
        results = list(runner.results())
        assert sorted(result.tag for result in results) == list(range(500))
        for result in results:
            assert result.output.error is None
            assert result.output.outputs[0].token_ids == [1 + result.tag % 50, 2]
            assert result.output.seed == 5
        assert job.most_in_flight <= 8
        assert job.is_closed

    def test_tokens_are_told_of_as_they_come(self, maker: RequestMaker) -> None:
        client, told = EchoClient(), list[int]()
        runner = Run(client, maker, rows_of(50), max_in_flight=8, on_tokens=told.append)  # type: ignore[arg-type]
        assert len(list(runner.results())) == 50
        assert sum(told) == 100
        assert 0 not in told

    def test_rows_are_pulled_lazily_and_a_slow_caller_holds_them_back(self, maker: RequestMaker) -> None:
        pulled = 0

        def source() -> Iterator[Row]:
            nonlocal pulled
            for row in rows_of(10_000):
                pulled += 1
                yield row

        results = run(maker, source(), max_in_flight=4)[0].results()
        for taken in range(1, 20):
            next(results)
            time.sleep(0.002)
            assert pulled <= taken + 4
        results.close()

    def test_bad_rows_are_results_and_disturb_nobody(self, maker: RequestMaker) -> None:
        rows = [Row(tag=tag, prompt=[] if tag % 3 == 0 else [5]) for tag in range(30)]
        results = {result.tag: result.output for result in run(maker, rows, max_in_flight=2)[0].results()}
        assert len(results) == 30
        assert all((output.error is not None) == (tag % 3 == 0) for tag, output in results.items())

    def test_a_source_that_waits_for_answers_gets_them(self, maker: RequestMaker) -> None:
        answered = threading.Semaphore(0)

        def source() -> Iterator[Row]:
            for row in rows_of(5):
                yield row
                yield row
                assert answered.acquire(timeout=10)
                assert answered.acquire(timeout=10)

        count = 0
        for _ in run(maker, source())[0].results():
            count += 1
            answered.release()
        assert count == 10

    def test_what_the_source_raises_reaches_the_caller(self, maker: RequestMaker) -> None:
        def source() -> Iterator[Row]:
            yield from rows_of(3)
            raise OSError("the disk is gone")

        runner, job = run(maker, source())
        with pytest.raises(OSError, match="the disk is gone"):
            list(runner.results())
        assert job.is_closed

    def test_a_failed_engine_ends_the_run(self, maker: RequestMaker) -> None:
        runner, job = run(maker, rows_of(3), failing=True)
        with pytest.raises(ClusterError, match="on fire"):
            list(runner.results())
        assert job.is_closed

    def test_closing_early_gives_up_the_rest_and_stops_the_feeder(self, maker: RequestMaker) -> None:
        runner, job = run(maker, rows_of(10_000))
        results = runner.results()
        next(results)
        results.close()
        assert job.is_closed
        runner._feeder.join(timeout=5)
        assert not runner._feeder.is_alive()

    def test_no_rows_are_no_results(self, maker: RequestMaker) -> None:
        assert list(run(maker, [])[0].results()) == []


class TestAssembling:
    def test_pieces_joined_are_the_final_text(self, maker: RequestMaker, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode_text("Ein Satz mit Umlaut: ä, und mehr.")
        prepared = maker.prepare(Row(tag=3, prompt=[1], params=SamplingParams(max_tokens=50)), "x")
        opened = OpenRequest(prepared, tokenizer)
        text = ""
        for position, token_id in enumerate(ids):
            is_last = position == len(ids) - 1
            wire = RequestOutput(
                request_id="x",
                first_position=position,
                token_ids=pack([token_id]),
                finish=FinishCode.LENGTH if is_last else FinishCode.NONE,
            )
            result, deltas = opened.add(wire)
            text += "".join(delta.content for delta in deltas)
            assert (result is not None) == is_last
        assert result.tag == 3
        assert text == result.output.outputs[0].text == "Ein Satz mit Umlaut: ä, und mehr."
        assert result.output.outputs[0].token_ids == ids
        assert result.output.outputs[0].finish_reason == "length"

    def test_a_token_that_ended_the_answer_is_in_the_ids_but_not_in_the_text(
        self, maker: RequestMaker, tokenizer: Tokenizer
    ) -> None:
        a, b = tokenizer.encode_text("a")[0], tokenizer.encode_text("b")[0]
        for stop_id, params in ((tokenizer.eos_token_id, SamplingParams()), (b, SamplingParams(stop_token_ids=(b,)))):
            opened = OpenRequest(maker.prepare(Row(tag=0, prompt=[1], params=params), "x"), tokenizer)
            wire = RequestOutput(request_id="x", token_ids=pack([a, stop_id]), finish=FinishCode.STOP)
            answer = opened.add(wire)[0].output.outputs[0]
            assert (answer.text, answer.token_ids, answer.finish_reason) == ("a", [a, stop_id], "stop")

    def test_samples_come_in_any_order(self, maker: RequestMaker, tokenizer: Tokenizer) -> None:
        opened = OpenRequest(maker.prepare(Row(tag=0, prompt=[1], params=SamplingParams(n=2)), "x"), tokenizer)
        second = RequestOutput(request_id="x", sample=1, token_ids=pack([9]), finish=FinishCode.LENGTH, num_drafted=3)
        first = RequestOutput(request_id="x", sample=0, token_ids=pack([8]), finish=FinishCode.STOP, num_drafted=4)
        assert opened.add(second)[0] is None
        output = opened.add(first)[0].output
        assert [(answer.index, answer.token_ids) for answer in output.outputs] == [(0, [8]), (1, [9])]
        assert output.num_drafted_tokens == 7

    def test_logprobs_are_dicts_with_the_chosen_token_first(self, maker: RequestMaker, tokenizer: Tokenizer) -> None:
        columns = LogprobColumns(
            counts=pack([2, 3]), token_ids=pack([5, 6, 9, 5, 6]), values=pack_floats([-0.5, -1, -3, -0.25, -np.inf])
        )
        prompt = LogprobColumns(counts=pack([0, 1]), token_ids=pack([4]), values=pack_floats([-2]))
        params = SamplingParams(logprobs=2, prompt_logprobs=0)
        opened = OpenRequest(maker.prepare(Row(tag=0, prompt=[1, 4], params=params), "x"), tokenizer)
        wire = RequestOutput(
            request_id="x",
            token_ids=pack([5, 9]),
            finish=FinishCode.LENGTH,
            logprobs=(columns,),
            prompt_logprobs=prompt,
        )
        output = opened.add(wire)[0].output
        assert output.prompt_logprobs == [None, {4: -2.0}]
        assert [list(entry.items()) for entry in output.outputs[0].logprobs] == [
            [(5, -0.5), (6, -1.0)],
            [(9, -3.0), (5, -0.25), (6, -np.inf)],
        ]

    def test_an_error_replaces_everything(self, maker: RequestMaker, tokenizer: Tokenizer) -> None:
        opened = OpenRequest(maker.prepare(Row(tag=0, prompt=[1, 4]), "x"), tokenizer)
        failure = RequestFailure(request_id="x", index=0, kind="numerics", text="NaN")
        output = opened.add(RequestOutput(request_id="x", finish=FinishCode.ERROR, error=failure))[0].output
        assert (output.error.code, str(output.error), output.outputs) == ("numerics", "NaN", [])
        assert output.prompt_token_ids == [1, 4]
