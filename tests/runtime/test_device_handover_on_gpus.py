"""A prefill and a decode rank, each in a process of its own, on one GPU or two: the way of the KV changes no answer."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import RankPlace, run_processes
from support.rank_engines import Answer, RunningEngine, admission, run_decode, run_prefill
from support.tiny_ranks import tiny_requests
from torch.distributed import TCPStore

from deepinfer.codec import unpack
from deepinfer.config import load_config, resolve
from deepinfer.metrics import MemoryRecorder
from deepinfer.protocol import Request
from deepinfer.runtime.build import build_rank_engine
from deepinfer.runtime.rank_engine import RankEngine

WAIT_SECONDS = 150  # for a rank that still compiles
SETTINGS = (
    "model.max_model_len=512",
    "cache.block_size=64",
    "cache.memory_bytes=300000000",
    "cache.handover_bytes=100000000",
    "prefill.max_running=8",
    "prefill.max_tokens_per_step=512",
    "decode.max_running=8",
    "determinism.batch_invariant=true",
)
WAYS = (False, True)  # through the host, on the device


def _build(role: str, directory: Path) -> RankEngine:
    settings = [*SETTINGS, f"cache_dir={directory.parent / f'cache-of-{role}'}"]
    return build_rank_engine(
        resolve(load_config(environ={}, settings=settings).config, accelerator="nvidia"),
        role=role,
        rank=0,
        num_ranks=1,
        model_directory=directory,
        store_address=None,
        recorder=MemoryRecorder(),
        on_phase=lambda name: None,
    )


def _prefill(running: RunningEngine, store: TCPStore, requests: list[Request]) -> dict[str, Any]:
    for wake_id, on_device in enumerate(WAYS, start=1):
        done, _ = run_prefill(running, requests, wake_id=wake_id, device_handover=on_device)
        store.set(f"prefilled {wake_id}", pickle.dumps(done))
    store.get("decoded")
    return running.engine.status()["handovers"]


def _decode(running: RunningEngine, store: TCPStore, requests: list[Request]) -> dict[str, Any]:
    found = {}
    for wake_id, on_device in enumerate(WAYS, start=1):
        done = pickle.loads(store.get(f"prefilled {wake_id}"))
        answers = {index: Answer(unpack(item.first_token_ids).tolist()) for index, (item, _) in done.items()}
        admitted = [(admission(request, done[request.index][0]), done[request.index][1]) for request in requests]
        run_decode(running, admitted, answers, wake_id=wake_id)
        assert all(answer.failure is None for answer in answers.values()), answers
        found[on_device] = {index: (answer.token_ids, answer.logprobs) for index, answer in answers.items()}
    arena = running.engine._parts.intake._arena
    found["lie"] = arena.num_held
    store.set("decoded", b"all")
    return found


def _run_rank(place: RankPlace, argument: tuple[Path, list[Request]]) -> dict[str, Any]:
    directory, requests = argument
    seconds = timedelta(seconds=WAIT_SECONDS)
    store = TCPStore(place.host, place.port, is_master=False, timeout=seconds)
    role, work = (("prefill", _prefill), ("decode", _decode))[place.rank]
    with RunningEngine(_build(role, directory)) as running:
        return work(running, store, requests)


def _answers_agree(directory: Path, *, one_gpu_each: bool) -> None:
    requests = tiny_requests([5, 40, 130, 77, 9, 200, 31], logprobs=2)
    counts, found = run_processes(
        _run_rank,
        2,
        (directory, requests),
        timeout_seconds=WAIT_SECONDS,
        start_method="spawn",
        one_gpu_each=one_gpu_each,
    )
    assert found[True] == found[False]
    assert counts == {"device": len(requests), "host": len(requests), "lie": len(requests)}
    assert found["lie"] == 0


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_one_gpu(directory: Path) -> None:
    _answers_agree(directory, one_gpu_each=False)


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
def test_on_two_gpus(directory: Path) -> None:
    assert torch.cuda.device_count() > 1
    _answers_agree(directory, one_gpu_each=True)
