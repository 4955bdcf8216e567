"""Ranks built from a configuration and the tiny checkpoint, alone and as a group."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.processes import RankPlace, run_processes
from support.rank_engines import RunningEngine, answer_all, answer_rounds, run_prefill
from support.tiny_ranks import build_tiny_rank, tiny_config, tiny_requests

from deepinfer.errors import ConfigError
from deepinfer.kernels.reference.engram import EngramLookup
from deepinfer.metrics import MemoryRecorder
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.runtime.build import _Builder, build_rank_engine
from deepinfer.runtime.kv_transfer import pack_parts, split_parts

LENGTHS = [1, 5, 18, 33, 40]


def test_every_phase_is_told_and_logged(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    phases: list[str] = []
    with caplog.at_level(logging.INFO, logger="deepinfer"):
        build_rank_engine(
            tiny_config(),
            role="decode",
            rank=0,
            num_ranks=1,
            model_directory=str(directory),
            store_address=None,
            recorder=MemoryRecorder(),
            on_phase=phases.append,
        )
    assert phases == ["meeting 1 ranks", "loading weights", "allocating caches"]
    lines = [record.getMessage() for record in caplog.records if record.name == "deepinfer.decode-0"]
    for phase in phases:
        assert f"{phase}: begin" in lines
        assert any(line.startswith(f"{phase}: done in ") for line in lines)


@pytest.mark.parametrize("is_readable", [True, False])
def test_steps_that_wait_for_the_host_are_not_recorded(
    directory: Path, is_readable: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a host whose memory the device can't read; the start says what that costs."""
    monkeypatch.setattr(CpuPlatform, "has_graphs", True)
    monkeypatch.setattr(EngramLookup, "capturable", lambda *_, **__: is_readable)
    requests = tiny_requests([3, 20, 5])
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        decode = build_tiny_rank("decode", directory)
    assert (decode._parts.runner._graphs is not None) == is_readable
    said = [record.getMessage() for record in caplog.records if "none is recorded" in record.getMessage()]
    assert len(said) == (0 if is_readable else 1)
    answers = answer_all(build_tiny_rank("prefill", directory), decode, requests)
    assert all(answer.failure is None for answer in answers.values())


def test_what_a_runner_keeps_is_part_of_what_a_step_needs() -> None:
    """On a GPU; there the caches get what is left."""
    builder = SimpleNamespace(
        platform=SimpleNamespace(name="nvidia", peak_bytes=lambda work: 1000),
        runner=lambda loaded, size, make_drafter: SimpleNamespace(kept_bytes=24),
        config=tiny_config(),
        role="decode",
        rank=0,
        max_running=8,
        _num_decode_drafts=lambda loaded: 0,
    )
    assert _Builder._step_bytes(builder, SimpleNamespace(kv_groups=())) == 1024


def test_ranks_that_exchange_kv_have_equal_digests(directory: Path) -> None:
    prefill, decode = (build_tiny_rank(role, directory).ready for role in ("prefill", "decode"))
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.model_digest == decode.model_digest
    assert prefill.layout_digest == decode.layout_digest
    assert prefill.kernel_set == decode.kernel_set
    assert set(prefill.kernel_set.values()) == {"reference"}
    unquantised = build_tiny_rank("decode", directory, "kernels.numerics=fp32").ready
    assert unquantised.layout_digest != decode.layout_digest


def test_a_context_beyond_the_checkpoint_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.max_model_len: 10000000 tokens are above"):
        build_tiny_rank("decode", directory, "model.max_model_len=10000000")


def test_kv_put_in_comes_out_with_the_same_bits(directory: Path) -> None:
    """A hand-over, scattered into other blocks of another rank and gathered there again."""
    prefill, decode = (build_tiny_rank(role, directory, "cache.block_size=2") for role in ("prefill", "decode"))
    requests = tiny_requests([1, 7, 15, 16, 17, 49])
    with RunningEngine(prefill) as running:
        done, _ = run_prefill(running, requests, wake_id=1)
    runner = decode._parts.runner
    for slot, request in enumerate(requests, start=1):
        item, buffer = done[request.index]
        blocks = {"global": np.arange(60 - item.kv.num_tokens // 2, 61, dtype=np.int32)[::-1]}
        where = {"slot": slot, "block_ids": blocks, "num_tokens": item.kv.num_tokens}
        runner.import_kv(**where, parts=split_parts(item.kv, buffer))
        parts = runner.export_kv(**where)
        handle, again = pack_parts(
            parts,
            request_id=item.request_id,
            source_rank=0,
            num_tokens=item.kv.num_tokens,
            layout_digest=item.kv.layout_digest,
        )
        assert handle == item.kv
        assert np.array_equal(again, buffer)


def _answer_in_group(place: RankPlace, directory: Path) -> dict[int, list[int]]:
    prefill = build_tiny_rank("prefill", directory, place=place)
    decode = build_tiny_rank("decode", directory, place=place)
    mine = tiny_requests(LENGTHS, max_tokens=8)[place.rank :: place.num_ranks]
    return answer_rounds(place, prefill, decode, [mine])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_spread_over_ranks_give_the_same_tokens(directory: Path, num_ranks: int) -> None:
    results = run_processes(_answer_in_group, num_ranks, directory)
    merged = {index: tokens for part in results for index, tokens in part.items()}
    ranks = [build_tiny_rank(role, directory) for role in ("prefill", "decode")]
    alone = answer_all(ranks[0], ranks[1], tiny_requests(LENGTHS, max_tokens=8))
    assert merged == {index: answer.token_ids for index, answer in alone.items()}
