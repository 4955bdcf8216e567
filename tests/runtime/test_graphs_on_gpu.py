"""Recorded steps of the tiny model on a GPU: the same answers as steps that are launched anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.rank_engines import answer_all
from support.tiny_ranks import build_tiny_rank, tiny_requests

# Padding changes the sizes of products: only the batch-invariant kernels give the same bits.
SETTINGS = ("accelerator=nvidia", "determinism.batch_invariant=true", "cache.memory_bytes=268435456")


@pytest.mark.gpu
@pytest.mark.parametrize("wishes", [{}, {"top_p": 0.9, "logprobs": 2, "presence_penalty": 0.5}])
@pytest.mark.parametrize("num_drafts", [0, 5])
def test_graphs_change_no_answer(directory: Path, wishes: dict[str, Any], num_drafts: int) -> None:
    requests = tiny_requests([1, 2, 17, 49, 90, 130, 40], **wishes)
    found = []
    for graphs in ("auto", "off"):
        drafts = f"speculative.max_draft_tokens={num_drafts}"
        prefill = build_tiny_rank("prefill", directory, *SETTINGS, drafts)
        decode = build_tiny_rank("decode", directory, *SETTINGS, drafts, f"decode.graphs={graphs}")
        answers = answer_all(prefill, decode, requests)
        assert all(answer.failure is None for answer in answers.values()), answers
        found.append({index: (answer.token_ids, answer.logprobs) for index, answer in answers.items()})
    assert found[0] == found[1]
