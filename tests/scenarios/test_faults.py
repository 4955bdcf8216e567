"""Faults under load: rows that mix, memory that grows, failures that nobody can read."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from support.answer_bits import answer_bits
from support.fake_cluster import FAKE_PROGRAM
from support.fake_engine import FAULT, Fault
from support.rank_engines import make_request
from support.tiny_ranks import VOCAB_SIZE, build_tiny_rank, smallest_cache

from deepinfer.batch_file import JobProgress, RowRunner, run_job
from deepinfer.errors import ClusterError
from deepinfer.llm import LLM
from deepinfer.models.deepseek_v41.tiny import tiny_directory
from deepinfer.outputs import Row, RowResult
from deepinfer.protocol import SamplingParams
from deepinfer.scheduler.sampling_params import derived_seed
from tests.doors.batch_files import read_rows, row, write_rows
from tests.scenarios.jobs import job_options, run_source

pytestmark = [pytest.mark.slow]

on_ray = pytest.mark.cluster
LONG_PROMPT = 30_000
MIB = 1 << 20


def test_p61_sixty_four_rows_keep_their_secrets(cache_dir: Path) -> None:
    """Rows with their own prompts and seeds, in a cache that holds one longest: each says what it says alone.

    A model with random weights can't repeat a secret word, so its tokens and their log-probabilities are compared:
    all rows with a run that has room for all of them, and every eighth with a run of one row at a time.
    """
    directory, numbers = tiny_directory(cache_dir), random.Random(61)
    settings = ("model.max_model_len=256", "cache.block_size=2")
    requests = [
        make_request(place, [numbers.randrange(VOCAB_SIZE) for _ in range(4 + place % 9)], max_tokens=8, logprobs=1)
        for place in range(64)
    ]
    crowded = (*settings, "speculative.max_draft_tokens=2", "prefill.max_running=16", "decode.max_running=32")
    crowded = (*crowded, f"cache.memory_bytes={smallest_cache(directory, *crowded)}")
    together, num_preemptions = answer_bits(*_ranks(directory, *crowded), requests)
    assert num_preemptions > 0
    roomy, _ = answer_bits(*_ranks(directory, *settings, "decode.max_running=64"), requests)
    assert [place for place in range(64) if together[place] != roomy[place]] == []
    one_by_one = (*settings, "speculative.max_draft_tokens=0", "prefill.max_running=1", "decode.max_running=1")
    alone, _ = answer_bits(*_ranks(directory, *one_by_one), requests[::8])
    assert [place for place in alone if together[place] != alone[place]] == []
    assert len({bits.token_ids for bits in together.values()}) > 60


def _ranks(directory: Path, *settings: str) -> list[Any]:
    return [build_tiny_rank(role, directory, *settings) for role in ("prefill", "decode")]


@on_ray
@pytest.mark.timeout(240)
def test_p61_preempted_samples_among_other_rows(llm: LLM) -> None:
    """Through the driver: eight samples that outgrow the cache of their rank, and rows that compete with them."""
    rows = [{"prompt": [9, place], "params": SamplingParams(max_tokens=4, seq_seed=place)} for place in range(8)]
    crowd = {"prompt": list(range(20, 32)), "params": SamplingParams(max_tokens=24, n=8, seq_seed=77, ignore_eos=True)}
    before = llm.status()["requests"]["num_preempted"]
    mixed = {out.tag: out for out in llm.generate_iter([crowd, *rows])}
    assert all(out.error is None for out in mixed.values())
    assert llm.status()["requests"]["num_preempted"] > before
    for place in (0, 7):
        alone = llm.generate([rows[place]["prompt"]], rows[place]["params"])[0]
        assert mixed[place + 1].outputs[0].token_ids == alone.outputs[0].token_ids
    for sample in (0, 3, 7):
        params = SamplingParams(max_tokens=24, seq_seed=derived_seed(77, sample), ignore_eos=True)
        alone = llm.generate([crowd["prompt"]], params)[0]
        assert mixed[0].outputs[sample].token_ids == alone.outputs[0].token_ids


@on_ray
@pytest.mark.timeout(240)
def test_p60_a_job_that_fails_names_the_cause_and_the_rows(local_ray: None, cache_dir: Path, tmp_path: Path) -> None:
    """Two rows break the rank they run on: the first fails alone, then the engine gives up with the second in work."""
    poison = [FAULT, int(Fault.RAISE)]
    rows = [row("good", [5]), row("poison-a", poison), row("poison-b", poison), row("unread", [6])]
    source, target = write_rows(tmp_path / "in", rows), tmp_path / "out"
    with (
        fake_llm(cache_dir, **{"decode.ranks": 1, "scheduler.max_in_flight": 1}) as engine,
        pytest.raises(ClusterError) as caught,
    ):
        run_source(engine, source, target)
    message = str(caught.value)
    assert "decode rank 0: ValueError: the fake device is on fire" in message
    assert "giving up; rows in work: 'poison-b' (line 3)" in message
    lines = {line["custom_id"]: line for line in read_rows(target)}
    assert set(lines) == {"good", "poison-a"}
    assert "the fake device is on fire" in lines["poison-a"]["error"]["message"]


@contextmanager
def fake_llm(cache_dir: Path, **settings: object) -> Iterator[LLM]:
    """An engine of fake ranks."""
    base = {"accelerator": "cpu", "prefill.ranks": 1, "decode.ranks": 2, "cache_dir": str(cache_dir)}
    with LLM("tiny", settings=base | settings, rank_program=FAKE_PROGRAM) as engine:
        yield engine


@on_ray
@pytest.mark.timeout(7200)
def test_p11_memory_of_driver_and_client_stays_flat(
    local_ray: None, cache_dir: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Short rows, every hundredth one of 30,000 tokens. In full: `pytest -k p11 --memory-rows 202000`.

    Compared are the largest sizes after the first quarter with the largest of all: 200 MiB of growth are allowed for
    the full number of rows, and 16 MiB at least, which is what allocators keep back.
    """
    num_rows: int = pytestconfig.getoption("--memory-rows")
    source = tmp_path / "in"
    with source.open("w") as file:
        for place in range(num_rows):
            prompt = [7] * LONG_PROMPT if place % 100 == 99 else [place % 250, 3]
            file.write(json.dumps(row(f"r{place}", prompt, max_tokens=2)) + "\n")
    with fake_llm(cache_dir, **{"model.max_model_len": LONG_PROMPT + 100}) as engine:
        watch = _MemoryWatch(engine, every=num_rows // 40)
        progress = JobProgress()
        options = job_options(source, tmp_path / "out")
        run_job(options, texts=engine.tokenizer, start_engine=lambda: watch, progress=progress)
    assert (progress.num_answered, progress.num_failed) == (num_rows, 0)
    allowed = max(16 * MIB, 200 * MIB * num_rows // 202_000)
    for name, sizes in watch.sizes.items():
        growth = max(sizes) - max(sizes[: len(sizes) // 4])
        print(f"{name}: {sizes[0] / MIB:.0f} MiB at first, {max(sizes) / MIB:.0f} MiB at most, grew {growth / MIB:.1f}")
        assert growth < allowed, (name, sizes)


class _MemoryWatch:
    """Passes rows through to an engine, and notes the resident bytes of this process and of the driver on the way."""

    def __init__(self, engine: LLM, *, every: int) -> None:
        self._engine = engine
        self._every = every
        driver_pid = ray.get(engine._client._driver.__ray_call__.remote(lambda _: os.getpid()))
        self._processes = {"client": psutil.Process(), "driver": psutil.Process(driver_pid)}
        self.sizes: dict[str, list[int]] = {name: [] for name in self._processes}

    def __enter__(self) -> RowRunner:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run_rows(self, rows: Iterator[Row], *, on_tokens: Callable[[int], None]) -> Iterator[RowResult]:
        for number, result in enumerate(self._engine.run_rows(rows, on_tokens=on_tokens)):
            if number % self._every == 0:
                for name, process in self._processes.items():
                    self.sizes[name].append(process.memory_info().rss)
            yield result
