"""Rank engines around the fake model, each with its step thread, and a driver small enough to read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from support.fake_grammars import fake_compiler
from support.fake_model import NUM_EXPERTS, VOCAB_SIZE, FakeModel, fake_groups
from support.processes import RankPlace

from deepinfer.codec import pack, unpack, unpack_codes
from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.step_sync import GroupStepSync, LocalStepSync
from deepinfer.distributed.torch_dispatcher import TorchDispatcher
from deepinfer.kernels.registry import select_kernels
from deepinfer.kv_cache.cache_manager import CacheManager
from deepinfer.kv_cache.kv_groups import layout_digest
from deepinfer.metrics import MemoryRecorder
from deepinfer.platforms.platform import Stream, load_platform
from deepinfer.protocol import (
    AdmittedRequest,
    DecodeBatch,
    FinishCode,
    PrefillBatch,
    PrefilledRequest,
    RankReady,
    Request,
    RequestFailure,
    SamplingParams,
)
from deepinfer.runtime.build_drafts import MakeDrafter
from deepinfer.runtime.kv_intake import KVIntake
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.piece_arena import PieceArena
from deepinfer.runtime.rank_engine import EngineParts, RankEngine, StepObserver
from deepinfer.runtime.rank_metrics import RankMetrics
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.speculation import Speculation
from deepinfer.runtime.step_graphs import Capture
from deepinfer.scheduler.step_scheduler import StepScheduler
from deepinfer.scheduler.stopping import StopChecker
from deepinfer.speculative.cost_table import CostTable
from deepinfer.speculative.verifier import SharedNoiseVerifier
from deepinfer.speculative.verify_planner import VerifyPlanner

Role = Literal["prefill", "decode"]
EOS = 0
WAIT_SECONDS = 180.0  # also for kernels that are compiled on a busy machine


@dataclass
class FakeRank:
    """What `build_fake_rank` made, with the parts that tests look into."""

    engine: RankEngine
    model: FakeModel
    scheduler: StepScheduler
    recorder: MemoryRecorder
    events: list[tuple[str, int]]
    observers: list[StepObserver]


def build_fake_rank(
    role: Role,
    *,
    model: FakeModel | None = None,
    num_blocks: int = 200,
    tokens_per_block: int = 4,
    max_running: int = 8,
    max_tokens_per_step: int = 64,
    max_model_len: int = 256,
    asynchronous: bool = True,
    groups: ProcessGroups | None = None,
    stream: Stream | None = None,
    max_drafts: int = 0,
    make_drafter: MakeDrafter | None = None,
    costs: CostTable | None = None,
    capture: Capture | None = None,
    handover_bytes: int = 0,
) -> FakeRank:
    """One rank with the fake model; with `groups` it is one of several. `events` and `observers` see its steps.

    `handover_bytes`: its memory for hand-overs that other ranks can open. With `make_drafter` a decode rank verifies
    drafts, with `costs` as many as pay. With `capture` its steps are padded to tiers and recorded.
    """
    model = model or FakeModel()
    rank = groups.sync.rank if groups else 0
    kv_groups = fake_groups(tokens_per_block)
    blocks = {"global": num_blocks}
    table = SlotTable(
        num_slots=max_running + 1,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        groups=kv_groups,
        device=torch.device("cpu"),
        bad_word_ids=lambda params: (),
        max_drafts=max_drafts,
    )
    drafter = make_drafter(table) if make_drafter else None
    runner = ModelRunner(
        model=model,
        caches=model.allocate_caches(num_blocks=blocks, num_slots=max_running + 1, tokens_per_block=tokens_per_block),
        table=table,
        kernels=select_kernels("cpu", numerics="reference", batch_invariant=False, overrides={}),
        dispatcher=TorchDispatcher(groups.dispatch, NUM_EXPERTS) if groups else LocalDispatcher(NUM_EXPERTS),
        speculation=Speculation(table, drafter=drafter, verifier=SharedNoiseVerifier()),
        capture=capture,
    )
    runner.record_graphs()
    scheduler = StepScheduler(
        role=role,
        cache=CacheManager(kv_groups, num_blocks=blocks, num_slots=max_running + 1),
        max_running=max_running,
        max_tokens_per_step=max_tokens_per_step,
        max_model_len=max_model_len,
        make_stop_checker=lambda request: _stop_checker(request, max_model_len),
        max_rows_per_slot=1 + max_drafts,
    )
    recorder, events = MemoryRecorder(), []
    platform = load_platform("cpu")
    arena = PieceArena(platform.share_memory(handover_bytes)) if handover_bytes else None
    observers: list[StepObserver] = [lambda event, step_id: events.append((event, step_id))]
    engine = RankEngine(
        EngineParts(
            role=role,
            rank=rank,
            scheduler=scheduler,
            runner=runner,
            stream=stream or platform.open_stream(f"{role}-{rank}"),
            sync=GroupStepSync(groups.sync) if groups else LocalStepSync(),
            metrics=RankMetrics(recorder, role=role, num_blocks={"global": num_blocks - 1}),
            compiler=fake_compiler(VOCAB_SIZE),
            groups=kv_groups,
            ready=_ready(role, rank, blocks, max_running + 1, layout_digest(kv_groups)),
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            planner=VerifyPlanner(costs, max_drafts) if costs else None,
            asynchronous=asynchronous,
            observe_step=lambda event, step_id: [observe(event, step_id) for observe in observers],
            arena=arena if role == "prefill" else None,
            intake=KVIntake(platform, f"{role}-{rank}-intake", arena) if role == "decode" else None,
        )
    )
    return FakeRank(engine, model, scheduler, recorder, events, observers)


def _stop_checker(request: Request, max_model_len: int) -> StopChecker:
    return StopChecker(
        request.sampling,
        eos_token_id=EOS,
        num_prompt_tokens=request.num_prompt_tokens,
        max_model_len=max_model_len,
        output_token_ids=unpack(request.output_token_ids).tolist(),
    )


def _ready(role: Role, rank: int, num_blocks: dict[str, int], num_slots: int, digest: str) -> RankReady:
    return RankReady(
        rank=rank,
        role=role,
        node="test",
        device="cpu",
        pid=0,
        num_blocks=num_blocks,
        num_slots=num_slots,
        kernel_set={},
        model_digest="fake",
        layout_digest=digest,
        version="0",
    )


def make_request(index: int, prompt: Sequence[int], **sampling: Any) -> Request:
    """A request that draws with a seed of its own unless told otherwise; `n` makes it that many samples."""
    params = SamplingParams(**{"max_tokens": 12, "seq_seed": 1000 + index, "ignore_eos": True, **sampling})
    return Request(
        request_id=f"request-{index}",
        index=index,
        prompt_token_ids=pack(list(prompt)),
        num_prompt_tokens=len(prompt),
        num_samples=params.n,
        sampling=params,
    )


class RunningEngine:
    """An engine on a thread of its own, stopped at the end of a `with` block; an error there is raised there."""

    def __init__(self, engine: RankEngine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._news = threading.Event()
        engine.results_ready = self._news.set
        self._thread = threading.Thread(target=self._run, name="step thread")

    def __enter__(self) -> RunningEngine:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.engine.stop()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the step thread hangs"
        if self.error is not None and kind is None:
            raise self.error

    def next_results(self) -> tuple[Any, list[np.ndarray]]:
        """Wait for news and return them."""
        while True:
            assert self._news.wait(WAIT_SECONDS), f"no news: {self.engine.status()}"
            self._news.clear()
            if self.error is not None:
                raise self.error
            message, buffers = self.engine.take_results()
            if message is not None:
                return message, buffers

    def _run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:
            self.error = error
            self._news.set()


@dataclass
class Answer:
    """One sequence's whole output."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishCode = FinishCode.NONE
    logprobs: list[Any] = field(default_factory=list)
    failure: RequestFailure | None = None
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def run_prefill(
    running: RunningEngine, requests: Iterable[Request], *, wake_id: int, device_handover: bool = False
) -> tuple[dict[int, tuple[PrefilledRequest, np.ndarray | None]], dict[int, RequestFailure]]:
    """Prefill all requests on one rank; returns by index what came back, and failures."""
    requests = list(requests)
    running.engine.post(
        PrefillBatch(batch_id=wake_id, wake_id=wake_id, requests=tuple(requests), device_handover=device_handover)
    )
    done: dict[int, tuple[PrefilledRequest, np.ndarray | None]] = {}
    failures: dict[int, RequestFailure] = {}
    while len(done) + len(failures) < len(requests):
        result, buffers = running.next_results()
        left = iter(buffers)
        done.update({item.index: (item, _buffer_of(item, left)) for item in result.items})
        failures.update({failure.index: failure for failure in result.failures})
    return done, failures


def _buffer_of(item: PrefilledRequest, buffers: Iterator[np.ndarray]) -> np.ndarray | None:
    return next(buffers) if item.kv is not None and item.kv.place is None else None


def admission(request: Request, item: PrefilledRequest) -> AdmittedRequest:
    """The sequences of a prefilled request that go on."""
    going_on = np.flatnonzero(unpack_codes(item.finish_codes) == FinishCode.NONE)
    return AdmittedRequest(
        request=request,
        sample_offsets=pack(going_on),
        first_token_ids=pack(unpack(item.first_token_ids)[going_on]),
        kv=item.kv,
    )


def run_decode(
    running: RunningEngine,
    admitted: Sequence[tuple[AdmittedRequest, np.ndarray | None]],
    answers: dict[int, Answer],
    *,
    wake_id: int,
) -> list[int]:
    """Decode on one rank until every sequence has ended or was preempted; returns the preempted ones."""
    running.engine.post(
        DecodeBatch(batch_id=wake_id, wake_id=wake_id, admitted=tuple(entry for entry, _ in admitted)),
        [buffer for _, buffer in admitted if buffer is not None],
    )
    left = {entry.request.index + offset for entry, _ in admitted for offset in unpack(entry.sample_offsets).tolist()}
    preempted = []
    while left:
        result, _ = running.next_results()
        take_decode_result(result, answers)
        ended = {index for index in left if answers[index].finish or answers[index].failure}
        for index in sorted(ended):
            if answers[index].finish is FinishCode.PREEMPTED:
                answers[index].finish = FinishCode.NONE
                answers[index].num_preemptions += 1
                preempted.append(index)
        left -= ended
    return preempted


def take_decode_result(result: Any, answers: dict[int, Answer]) -> None:
    """Append a result's tokens to their answers."""
    token_ids = iter(unpack(result.token_ids).tolist())
    indexes = unpack(result.sequence_indexes).tolist()
    for index, count, code in zip(
        indexes, unpack(result.num_tokens).tolist(), unpack_codes(result.finish_codes).tolist(), strict=True
    ):
        answers[index].token_ids += [next(token_ids) for _ in range(count)]
        answers[index].finish = FinishCode(code)
    for index, drafted, accepted in zip(
        indexes, unpack(result.num_drafted).tolist(), unpack(result.num_accepted).tolist(), strict=True
    ):
        answers[index].num_drafted += drafted
        answers[index].num_accepted += accepted
    for place, columns in zip(unpack(result.logprob_sequences).tolist(), result.logprobs, strict=True):
        answers[indexes[place]].logprobs.append(columns)
    for failure in result.failures:
        answers[failure.index].failure = failure


def replay(request: Request, sample: int, answer: Answer) -> Request:
    """One preempted sequence as a request of its own."""
    return msgspec.structs.replace(
        request,
        index=request.index + sample,
        first_sample=sample,
        num_samples=1,
        output_token_ids=pack(answer.token_ids),
    )


def answer_all(
    prefill: RankEngine, decode: RankEngine, requests: Sequence[Request], *, device_handover: bool = False
) -> dict[int, Answer]:
    """Answer requests on one prefill and one decode rank, replaying what is preempted."""
    origins = {r.index + sample: (r, sample) for r in requests for sample in range(r.num_samples)}
    answers = {index: Answer() for index in origins}
    with RunningEngine(prefill) as prefilling, RunningEngine(decode) as decoding:
        batch, wake_id = list(requests), 0
        while batch:
            wake_id += 1
            done, failures = run_prefill(prefilling, batch, wake_id=wake_id, device_handover=device_handover)
            for index, failure in failures.items():
                answers[index].failure = failure
            admitted = []
            for request in batch:
                if request.index not in done:
                    continue
                item, buffer = done[request.index]
                _take_first_tokens(item, answers)
                if item.kv is not None:
                    admitted.append((admission(request, item), buffer))
            preempted = run_decode(decoding, admitted, answers, wake_id=wake_id) if admitted else []
            batch = [replay(*origins[index], answers[index]) for index in preempted]
    return answers


def answer_rounds(
    place: RankPlace, prefill: RankEngine, decode: RankEngine, rounds: Sequence[Sequence[Request]]
) -> dict[int, list[int]]:
    """One process of several: answer its own requests of each round; all ranks park between the rounds."""
    answers: dict[int, Answer] = {}
    with RunningEngine(prefill) as prefilling, RunningEngine(decode) as decoding:
        for wake_id, requests in enumerate(rounds, start=1):
            done, _ = run_prefill(prefilling, requests, wake_id=wake_id)
            answers |= {index: Answer() for index in done}
            for item, _ in done.values():
                _take_first_tokens(item, answers)
            going_on = [request for request in requests if done[request.index][0].kv is not None]
            admitted = [(admission(request, done[request.index][0]), done[request.index][1]) for request in going_on]
            run_decode(decoding, admitted, answers, wake_id=wake_id)
            wait_until_parked(prefilling)
            wait_until_parked(decoding)
        place.wait_for_all("answered")  # a rank that has finished helps the others until then
    return {index: answer.token_ids for index, answer in answers.items()}


def wait_until_parked(running: RunningEngine) -> None:
    """Wait until the engine's group has nothing to do; raises what has broken it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not running.engine.status()["parked"]:
        if running.error is not None:
            raise running.error
        assert time.monotonic() < deadline, running.engine.status()
        time.sleep(0.001)


def _take_first_tokens(item: PrefilledRequest, answers: dict[int, Answer]) -> None:
    codes = unpack_codes(item.finish_codes).tolist()
    for sample, (token_id, code) in enumerate(zip(unpack(item.first_token_ids).tolist(), codes, strict=True)):
        answer = answers[item.index + sample]
        answer.token_ids.append(token_id)
        answer.finish = FinishCode(code)
