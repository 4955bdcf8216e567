"""Decode ranks on two GPUs, each the only one that its process sees, answer like one rank on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import RankPlace, run_processes
from support.rank_engines import answer_rounds
from support.tiny_ranks import tiny_requests

from deepinfer.config import load_config, resolve
from deepinfer.metrics import MemoryRecorder
from deepinfer.models.deepseek_v41.tiny import tiny_directory
from deepinfer.protocol import Request
from deepinfer.runtime.build import build_rank_engine
from deepinfer.runtime.rank_engine import RankEngine

pytestmark = pytest.mark.multi_gpu

SETTINGS = (
    "model.max_model_len=512",
    "cache.block_size=64",
    "cache.memory_bytes=300000000",
    "prefill.max_running=8",
    "prefill.max_tokens_per_step=512",
    "decode.max_running=8",
    "determinism.batch_invariant=true",
)


def _build(role: str, directory: Path, tables: str, place: RankPlace | None) -> RankEngine:
    settings = [*SETTINGS, f"decode.ngram_tables={tables}"]
    return build_rank_engine(
        resolve(load_config(environ={}, settings=settings).config, accelerator="nvidia"),
        role=role,
        rank=place.rank if place else 0,
        num_ranks=place.num_ranks if place else 1,
        model_directory=directory,
        store_address=(place.host, place.port) if place else None,
        recorder=MemoryRecorder(),
        on_phase=lambda name: None,
    )


def _answer_share(place: RankPlace, argument: tuple[Path, str, list[list[Request]]]) -> dict[str, Any]:
    """Prefill and decode this rank's requests; only the decode ranks are a group."""
    directory, tables, shares = argument
    prefill, decode = _build("prefill", directory, tables, None), _build("decode", directory, tables, place)
    answers = answer_rounds(place, prefill, decode, [shares[place.rank]])
    dispatcher = decode._parts.runner._around.dispatcher
    return {"answers": answers, "dispatcher": type(dispatcher).__name__, "steps": decode.status()["step"]}


def _answer(directory: Path, tables: str, shares: list[list[Request]]) -> list[dict[str, Any]]:
    argument = (directory, tables, shares)
    return run_processes(_answer_share, len(shares), argument, start_method="spawn", one_gpu_each=True)


@pytest.mark.parametrize("tables", ["host", "sharded"])
def test_two_gpus_answer_like_one(tables: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    directory = tiny_directory(tmp_path)
    requests = tiny_requests([5, 40, 130, 77, 9, 200, 31])
    (alone,) = _answer(directory, tables, [requests])
    both = _answer(directory, tables, [requests[:2], requests[2:]])
    assert [part["dispatcher"] for part in both] == ["PushDispatcher", "PushDispatcher"]
    assert both[0]["answers"] | both[1]["answers"] == alone["answers"]
