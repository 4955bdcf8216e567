"""Decode ranks on two GPUs, each the only one that its process sees, answer like one rank on one GPU."""

from __future__ import annotations

import faulthandler
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.processes import RankPlace, run_processes
from support.rank_engines import answer_rounds
from support.tiny_ranks import tiny_requests

from deepinfer.config import load_config, resolve
from deepinfer.log import set_up_logging
from deepinfer.metrics import MemoryRecorder
from deepinfer.protocol import Request
from deepinfer.runtime.build import build_rank_engine
from deepinfer.runtime.rank_engine import RankEngine

pytestmark = pytest.mark.multi_gpu

WAIT_SECONDS = 240  # for a rank that still compiles
STALL_SECONDS = 45  # after which a rank says where it stands, again and again (`pytest -s` shows it)
SETTINGS = (
    "model.max_model_len=512",
    "cache.block_size=64",
    "cache.memory_bytes=300000000",
    "prefill.max_running=8",
    "prefill.max_tokens_per_step=512",
    "decode.max_running=8",
    "determinism.batch_invariant=true",
    f"scheduler.step_timeout_seconds={WAIT_SECONDS}",
)


def _cache_dir(directory: Path, rank: int) -> Path:
    """Each process has one of its own: DeepGEMM's may not be filled by two at a time."""
    return directory.parent / f"cache-{rank}"


def _build(role: str, directory: Path, tables: str, place: RankPlace) -> RankEngine:
    """Only the decode ranks are a group."""
    is_grouped = role == "decode"
    settings = [*SETTINGS, f"decode.ngram_tables={tables}", f"cache_dir={_cache_dir(directory, place.rank)}"]
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


def _answer_share(place: RankPlace, argument: tuple[Path, str, list[list[Request]]]) -> dict[str, Any]:
    """Prefill and decode this rank's requests."""
    directory, tables, shares = argument
    set_up_logging("info", process=f"rank {place.rank} of {place.num_ranks}")
    faulthandler.dump_traceback_later(STALL_SECONDS, repeat=True)
    prefill, decode = (_build(role, directory, tables, place) for role in ("prefill", "decode"))
    answers = answer_rounds(place, prefill, decode, [shares[place.rank]])
    faulthandler.cancel_dump_traceback_later()
    runner = decode._parts.runner
    dispatcher = type(runner._around.dispatcher).__name__
    return {"answers": answers, "dispatcher": dispatcher, "is_recorded": runner._graphs is not None}


def _answer(directory: Path, tables: str, shares: list[list[Request]]) -> list[dict[str, Any]]:
    argument = (directory, tables, shares)
    return run_processes(
        _answer_share,
        len(shares),
        argument,
        timeout_seconds=WAIT_SECONDS,
        start_method="spawn",
        one_gpu_each=True,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tables", ["host", "sharded"])
def test_two_gpus_answer_like_one(tables: str, directory: Path) -> None:
    requests = tiny_requests([5, 40, 130, 77, 9, 200, 31])
    (alone,) = _answer(directory, tables, [requests])
    if _cache_dir(directory, 0).exists():  # unless the environment says where compiled kernels are kept
        shutil.copytree(_cache_dir(directory, 0), _cache_dir(directory, 1), dirs_exist_ok=True)
    both = _answer(directory, tables, [requests[:2], requests[2:]])
    assert [part["dispatcher"] for part in both] == ["PushDispatcher", "PushDispatcher"]
    assert [part["is_recorded"] for part in both] == [True, True]
    assert both[0]["answers"] | both[1]["answers"] == alone["answers"]
