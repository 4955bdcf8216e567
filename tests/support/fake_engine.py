"""A rank engine without torch and without a model, behind the same surface as the real one.

Token t of a sequence is a function of its prompt, its sample number and t alone, so that every answer can be checked
(`expected_tokens`), also after a replay. The KV buffer of a hand-over holds the prompt, and a decode rank reads the
prompt from there and from nowhere else: a buffer that went astray shows as a wrong answer.

A prompt that begins with `FAULT` asks for one: see `Fault`.
"""

from __future__ import annotations

import enum
import os
import queue
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer import __version__
from deepinfer.codec import pack, pack_codes, unpack
from deepinfer.config import ClusterConfig, config_fields
from deepinfer.errors import CheckpointError
from deepinfer.kv_cache.kv_groups import KVGroup, layout_digest
from deepinfer.protocol import (
    AdmittedRequest,
    DecodeBatch,
    DecodeResult,
    FinishCode,
    KVGroupExtent,
    KVHandle,
    PrefillBatch,
    PrefilledRequest,
    PrefillResult,
    RankLoad,
    RankReady,
    Request,
    RequestFailure,
)

VOCAB_SIZE = 512
MAX_MODEL_LEN = 4096
NUM_BLOCKS = 600
FAULT = 500  # first token of a prompt that asks for a fault; the second says which
_FIRST_ID, _LAST_ID = 300, 450
GROUPS = (KVGroup("main", "paged", 64, 64 * 4, False, "fake 4"),)
DIGEST = layout_digest(GROUPS)


class Fault(enum.IntEnum):
    """What a rank does when such a prompt arrives. The `*_ONCE` faults spare replayed requests."""

    RAISE = 1
    HANG_ONCE = 2
    FAIL_REQUEST = 3
    KILL_ONCE = 4
    KILL_PREFILL_ONCE = 5


def expected_tokens(prompt: Sequence[int], sample: int, first: int, count: int) -> list[int]:
    """Return tokens `first .. first + count - 1` of an answer."""
    seed = zlib.crc32(pack(prompt)) + 7919 * sample
    return [_FIRST_ID + (seed + 31 * t) % (_LAST_ID - _FIRST_ID) for t in range(first, first + count)]


def open_store(host: str) -> tuple[socket.socket, int]:
    """Open a port, as the real rendezvous does."""
    store = socket.create_server((host, 0))
    return store, store.getsockname()[1]


class FakeEngine:
    """One rank; `step_seconds` is what a step takes."""

    def __init__(
        self,
        *,
        role: str,
        rank: int,
        max_running: int,
        step_seconds: float,
        max_model_len: int = MAX_MODEL_LEN,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.groups = GROUPS
        self.vocab_size = VOCAB_SIZE
        self.max_model_len = max_model_len
        self._settings = settings or {}
        self.results_ready: Callable[[], None] = lambda: None
        num_blocks = NUM_BLOCKS * max_model_len // MAX_MODEL_LEN
        self.ready = RankReady(
            rank=rank, role=role, node=socket.gethostname(), device="fake", pid=os.getpid(),
            num_blocks={"main": num_blocks}, num_slots=max_running + 1, kernel_set={}, model_digest="fake",
            layout_digest=DIGEST, version=__version__,
        )  # fmt: skip
        self._role = role
        self._rank = rank
        self._step_seconds = step_seconds
        self._inbox: queue.Queue[tuple[Any, Sequence[Any]] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._prefilled: list[tuple[PrefilledRequest, np.ndarray | None]] = []
        self._decoded: list[tuple[int, list[int], FinishCode]] = []
        self._failures: list[RequestFailure] = []
        self._running: dict[int, _Sequence] = {}
        self._step = 0
        self._parked = True
        self._stopped = False

    def post(self, message: PrefillBatch | DecodeBatch, buffers: Sequence[Any] = ()) -> None:
        self._inbox.put((message, buffers))

    def stop(self) -> None:
        self._inbox.put(None)

    def status(self) -> dict[str, Any]:
        shown = ("TEST_", "DEEPINFER_", "GLOO_")
        return {"step": self._step, "parked": self._parked, "omp": os.environ.get("OMP_NUM_THREADS"),
                "settings": self._settings,
                "environment": {k: v for k, v in os.environ.items() if k.startswith(shown)}}  # fmt: skip

    def take_results(self) -> tuple[PrefillResult | DecodeResult | None, list[np.ndarray]]:
        with self._lock:
            prefilled, self._prefilled = self._prefilled, []
            decoded, self._decoded = self._decoded, []
            failures, self._failures = self._failures, []
        load = RankLoad(rank=self._rank, step_id=self._step, num_running=len(self._running))
        if not prefilled and not decoded and not failures:
            return None, []
        if self._role == "prefill":
            items = tuple(item for item, _ in prefilled)
            result = PrefillResult(rank=self._rank, items=items, failures=tuple(failures), load=load)
            return result, [buffer for _, buffer in prefilled if buffer is not None]
        return DecodeResult(
            rank=self._rank,
            step_id=self._step,
            sequence_indexes=pack([index for index, _, _ in decoded]),
            num_tokens=pack([len(tokens) for _, tokens, _ in decoded]),
            token_ids=pack([token for _, tokens, _ in decoded for token in tokens]),
            finish_codes=pack_codes([int(code) for _, _, code in decoded]),
            num_drafted=pack([0] * len(decoded)),
            num_accepted=pack([0] * len(decoded)),
            failures=tuple(failures),
            load=load,
        ), []

    def run(self) -> None:
        while not self._stopped:
            self._parked = not self._running
            self._drain()
            self._parked = False
            self._step += 1
            if self._running:
                time.sleep(self._step_seconds)
                self._advance()

    def _drain(self) -> None:
        block = not self._running
        while True:
            try:
                entry = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if entry is None:
                self._stopped = True
                return
            message, buffers = entry
            self._parked = False
            if message.drops_all:
                self._running.clear()
            if isinstance(message, PrefillBatch):
                for request in message.requests:
                    self._prefill(request)
            else:
                for admitted, buffer in zip(message.admitted, buffers, strict=True):
                    self._admit(admitted, buffer)
            for index in unpack(message.aborted_indexes).tolist():
                self._running.pop(index, None)

    def _prefill(self, request: Request) -> None:
        prompt = unpack(request.prompt_token_ids).tolist()
        is_replay = len(request.output_token_ids) > 0
        if prompt[:2] == [FAULT, Fault.KILL_PREFILL_ONCE] and not _marker(prompt).exists():
            _marker(prompt).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        done = len(request.output_token_ids) // 4
        tokens = [expected_tokens(prompt, request.first_sample + i, done, 1)[0] for i in range(request.num_samples)]
        ends = done + 1 >= request.sampling.max_tokens
        buffer = np.frombuffer(request.prompt_token_ids, np.uint8).copy()
        handle = KVHandle(
            request_id=request.request_id, source_rank=self._rank, num_tokens=len(prompt), layout_digest=DIGEST,
            groups=(KVGroupExtent(group="main", first_position=0, num_records=len(prompt), nbytes=buffer.nbytes),),
            nbytes=buffer.nbytes, checksum=zlib.crc32(buffer.tobytes()),
        )  # fmt: skip
        item = PrefilledRequest(
            request_id=request.request_id,
            index=request.index,
            first_token_ids=pack(tokens),
            finish_codes=pack_codes([int(FinishCode.LENGTH if ends else FinishCode.NONE)] * len(tokens)),
            kv=None if ends else handle,
        )
        assert not is_replay or not ends
        with self._lock:
            self._prefilled.append((item, None if ends else buffer))
        self.results_ready()

    def _admit(self, admitted: AdmittedRequest, buffer: np.ndarray) -> None:
        assert zlib.crc32(buffer.tobytes()) == admitted.kv.checksum
        request = admitted.request
        prompt = np.frombuffer(buffer.tobytes(), np.int32).tolist()
        is_replay = len(request.output_token_ids) > 0
        if prompt[0] == FAULT:
            self._misbehave(Fault(prompt[1]), request, is_replay=is_replay)
        if prompt[:2] == [FAULT, Fault.FAIL_REQUEST]:
            return
        for offset in unpack(admitted.sample_offsets).tolist():
            self._running[request.index + offset] = _Sequence(
                prompt=prompt,
                sample=request.first_sample + offset,
                num_output=len(request.output_token_ids) // 4 + 1,
                max_tokens=request.sampling.max_tokens,
            )

    def _misbehave(self, fault: Fault, request: Request, *, is_replay: bool) -> None:
        if fault is Fault.RAISE:
            raise ValueError("the fake device is on fire")
        if fault is Fault.HANG_ONCE and not is_replay:
            time.sleep(3600)
        if fault is Fault.KILL_ONCE and not is_replay:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is Fault.FAIL_REQUEST:
            failure = RequestFailure(
                request_id=request.request_id, index=request.index, kind="numerics", text="NaN in the fake logits"
            )
            with self._lock:
                self._failures.append(failure)
            self.results_ready()

    def _advance(self) -> None:
        with self._lock:
            for index, sequence in list(self._running.items()):
                token = expected_tokens(sequence.prompt, sequence.sample, sequence.num_output, 1)
                sequence.num_output += 1
                ends = sequence.num_output >= sequence.max_tokens
                self._decoded.append((index, token, FinishCode.LENGTH if ends else FinishCode.NONE))
                if ends:
                    del self._running[index]
            # One entry for each sequence, as the packed result demands.
            joined: dict[int, tuple[int, list[int], FinishCode]] = {}
            for index, tokens, code in self._decoded:
                earlier = joined.get(index, (index, [], FinishCode.NONE))[1]
                joined[index] = (index, earlier + tokens, code)
            self._decoded = list(joined.values())
        self.results_ready()


class _Sequence:
    def __init__(self, *, prompt: list[int], sample: int, num_output: int, max_tokens: int) -> None:
        self.prompt = prompt
        self.sample = sample
        self.num_output = num_output
        self.max_tokens = max_tokens


def _marker(prompt: Sequence[int]) -> Path:
    """A file that outlives the process and says that the fault has happened."""
    return Path(os.environ["TEST_MARKERS"]) / str(zlib.crc32(pack(prompt)))


def build(
    config: ClusterConfig,
    *,
    role: str,
    rank: int,
    num_ranks: int,
    model_directory: str,
    store_address: tuple[str, int] | None,
    recorder: Any,
    on_phase: Callable[[str], None],
) -> FakeEngine:
    """Build a fake rank. A directory named "broken" fails as a broken checkpoint would, on the last decode rank."""
    on_phase("loading weights 1/1")
    assert (store_address is None) == (num_ranks == 1)
    if store_address is not None:
        socket.create_connection(store_address, timeout=10).close()
    if model_directory.endswith("broken") and role == "decode" and rank == num_ranks - 1:
        raise CheckpointError("tensor layers.0.attn.wkv.weight is missing")
    max_running = (config.decode if role == "decode" else config.prefill).max_running
    recorder.set("deepinfer_kv_blocks_total", NUM_BLOCKS, {"group": "main"})
    return FakeEngine(
        role=role,
        rank=rank,
        max_running=max_running,
        step_seconds=0.002,
        max_model_len=config.model.max_model_len or MAX_MODEL_LEN,
        settings=config_fields(config),
    )
