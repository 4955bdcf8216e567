"""What the modes of prompts and of determinism ask for and refuse when a rank is built, and whom they concern."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rank_engines import RunningEngine, make_request, run_prefill
from support.tiny_ranks import build_tiny_rank

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.errors import ConfigError
from deepinfer.protocol import LogprobColumns, PrefilledRequest

PROMPT = [3 + place * 37 % 500 for place in range(70)]  # the kept suffix has 28 tokens


def prefill(directory: Path, *settings: str) -> dict[int, PrefilledRequest]:
    """Prefill one prompt twice in one rank, first (0) with log-probabilities of the prompt, then (1) without."""
    requests = [
        make_request(0, PROMPT, seq_seed=5, logprobs=2, prompt_logprobs=0),
        make_request(1, PROMPT, seq_seed=5, logprobs=2),
    ]
    with RunningEngine(build_tiny_rank("prefill", directory, *settings)) as running:
        done, failures = run_prefill(running, requests, wake_id=1)
    assert not failures
    return {index: item for index, (item, _) in done.items()}


def test_prompt_logprobs_give_full_depth_to_that_request_only(directory: Path) -> None:
    cut = prefill(directory, "prefill.max_tokens_per_step=64")
    whole = prefill(directory, "model.prefill_truncation=off")
    assert isinstance(cut[0].prompt_logprobs, LogprobColumns)
    assert cut[0].prompt_logprobs == whole[0].prompt_logprobs
    assert cut[0].first_logprobs == whole[0].first_logprobs == whole[1].first_logprobs
    assert cut[1].first_logprobs != whole[1].first_logprobs


def test_the_suffix_has_the_configured_length(directory: Path) -> None:
    """Two layers lie behind the source: their windows of 16 see 2 * 15 tokens before the last one."""
    whole = prefill(directory, "model.prefill_truncation=off")[1].first_logprobs
    assert prefill(directory, "model.prefill_keep_tokens=31")[1].first_logprobs == whole
    assert prefill(directory, "model.prefill_keep_tokens=30")[1].first_logprobs != whole


def test_too_short_a_suffix_is_refused(directory: Path) -> None:
    settings = ("speculative.max_draft_tokens=0", "model.prefill_keep_tokens=17")
    with pytest.raises(ConfigError, match=r"model.prefill_keep_tokens: 17 .* window of 16 .* 1 \+ 0 tokens need 18"):
        build_tiny_rank("decode", directory, *settings)
    build_tiny_rank("decode", directory, *settings, "model.prefill_truncation=off")


def test_a_dispatcher_that_sees_the_batch_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalDispatcher, "batch_invariant", False)
    with pytest.raises(ConfigError, match=r"determinism\.batch_invariant: LocalDispatcher"):
        build_tiny_rank("decode", directory, "determinism.batch_invariant=true")
    build_tiny_rank("decode", directory)
