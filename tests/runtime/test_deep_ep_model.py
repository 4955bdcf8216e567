"""Decode ranks on two GPUs that exchange rows by DeepEP answer like one rank on one GPU.

Has not run on GPUs so far; the same with two ranks on a CPU and the stand-in for DeepEP has.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import RankPlace, run_processes
from support.rank_engines import answer_rounds
from support.tiny_ranks import tiny_requests

from deepinfer.config import load_config, resolve
from deepinfer.distributed import dispatchers
from deepinfer.log import set_up_logging
from deepinfer.metrics import MemoryRecorder
from deepinfer.protocol import Request
from deepinfer.runtime.build import build_rank_engine
from deepinfer.runtime.rank_engine import RankEngine

pytestmark = pytest.mark.multi_gpu

WAIT_SECONDS = 240  # for a rank that still compiles
SETTINGS = (
    "model.max_model_len=512",
    "cache.block_size=64",
    "cache.memory_bytes=300000000",
    "prefill.max_running=8",
    "prefill.max_tokens_per_step=512",
    "decode.max_running=8",
    "decode.ngram_tables=sharded",
    "determinism.batch_invariant=true",
    f"scheduler.step_timeout_seconds={WAIT_SECONDS}",
)


def _build(role: str, directory: Path, place: RankPlace) -> RankEngine:
    """Only the decode ranks are a group."""
    is_grouped = role == "decode"
    settings = [*SETTINGS, f"cache_dir={directory.parent / f'cache-{place.rank}'}"]
    return build_rank_engine(
        resolve(load_config(environ={}, settings=settings).config, accelerator="nvidia"),
        role=role,
        rank=place.rank if is_grouped else 0,
        num_ranks=place.num_ranks if is_grouped else 1,
        model_directory=directory,
        store_address=(place.host, place.port) if is_grouped else None,
        recorder=MemoryRecorder(),
        on_phase=lambda name: None,
    )


def _answer_share(place: RankPlace, argument: tuple[Path, list[list[Request]]]) -> tuple[str, dict[str, Any]]:
    """Prefill and decode this rank's requests, as if the ranks were in two hosts."""
    directory, shares = argument
    set_up_logging("info", process=f"rank {place.rank} of {place.num_ranks}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatchers, "_look_around", lambda groups, device: (False, True))
        prefill, decode = (_build(role, directory, place) for role in ("prefill", "decode"))
    answers = answer_rounds(place, prefill, decode, [shares[place.rank]])
    return type(decode._parts.runner._around.dispatcher).__name__, answers


def _answer(directory: Path, shares: list[list[Request]]) -> list[tuple[str, dict[str, Any]]]:
    return run_processes(
        _answer_share,
        len(shares),
        (directory, shares),
        timeout_seconds=WAIT_SECONDS,
        start_method="spawn",
        one_gpu_each=True,
    )


@pytest.mark.timeout(900)
def test_ranks_that_exchange_by_deep_ep_answer_like_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip("needs DeepEP")
    monkeypatch.setenv("EP_DISABLE_GIN", "1")  # one host may have no network that DeepEP knows
    requests = tiny_requests([5, 40, 130, 77, 9, 200, 31])
    ((_, alone),) = _answer(directory, [requests])
    (first, some), (second, others) = _answer(directory, [requests[:2], requests[2:]])
    assert (first, second) == ("DeepEpDispatcher", "DeepEpDispatcher")
    assert some | others == alone
