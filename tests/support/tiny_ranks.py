"""Rank engines around the tiny checkpoint, built the way an actor builds them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.processes import RankPlace
from support.rank_engines import make_request

from deepinfer.config import ClusterConfig, load_config, resolve
from deepinfer.errors import ConfigError
from deepinfer.metrics import MemoryRecorder
from deepinfer.protocol import Request
from deepinfer.runtime.build import build_rank_engine
from deepinfer.runtime.build_drafts import MakeDrafter
from deepinfer.runtime.rank_engine import RankEngine, StepObserver

VOCAB_SIZE = 512


def tiny_config(*settings: str) -> ClusterConfig:
    """The CPU configuration with small caches; `settings` as for `--set`."""
    base = ("model.max_model_len=256", "cache.block_size=16", "prefill.max_running=8", "decode.max_running=8")
    return resolve(load_config(environ={}, settings=[*base, *settings]).config, accelerator="cpu")


def build_tiny_rank(
    role: str,
    directory: Path,
    *settings: str,
    place: RankPlace | None = None,
    observe_step: StepObserver | None = None,
    make_drafter: MakeDrafter | None = None,
) -> RankEngine:
    """One rank of the tiny model; with `place` it is one of several."""
    return build_rank_engine(
        tiny_config(*settings),
        role=role,
        rank=place.rank if place else 0,
        num_ranks=place.num_ranks if place else 1,
        model_directory=directory,
        store_address=(place.host, place.port) if place else None,
        recorder=MemoryRecorder(),
        on_phase=lambda name: None,
        observe_step=observe_step,
        make_drafter=make_drafter,
    )


def tiny_requests(lengths: list[int], **sampling: Any) -> list[Request]:
    """One request per prompt length, every third one greedy, 6 to 12 new tokens each."""
    numbers = random.Random(11)
    requests = []
    for place, length in enumerate(lengths):
        prompt = [numbers.randrange(VOCAB_SIZE) for _ in range(length)]
        temperature = 0.0 if place % 3 == 0 else 1.0
        options = {"max_tokens": numbers.randrange(6, 13), "temperature": temperature, **sampling}
        requests.append(make_request(place, prompt, **options))
    return requests


def with_sampling(request: Request, **changes: Any) -> Request:
    """The request with other sampling parameters."""
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **changes))


def smallest_cache(directory: Path, *settings: str) -> int:
    """The least `cache.memory_bytes` with which both roles start: it holds one longest sequence."""
    needed = []
    for role in ("prefill", "decode"):
        with pytest.raises(ConfigError, match="bytes are needed") as refused:
            build_tiny_rank(role, directory, *settings, "cache.memory_bytes=1")
        needed.append(int(str(refused.value).split(": ")[1].split()[0]))
    return max(needed)
