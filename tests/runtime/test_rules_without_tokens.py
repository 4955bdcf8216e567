"""Tokens that were drawn without their request's rules are counted, and a line of each rank names the request."""

from __future__ import annotations

from functools import partial

import pytest
from support.fake_model import VOCAB_SIZE
from support.log_lines import LogLines
from support.oracle import Accepted, OracleDrafter
from support.rank_engines import answer_all, build_fake_rank, make_request

PROMPT, ONLY = [3, 4, 5], 9


@pytest.mark.parametrize("max_drafts", [0, 2])
def test_rules_that_leave_no_token_are_counted_and_named(max_drafts: int) -> None:
    """The one id that is allowed is a stop id, which min_tokens excludes for four tokens; the fifth ends the answer."""
    rules = {"allowed_token_ids": (ONLY,), "stop_token_ids": (ONLY,), "min_tokens": 4, "max_tokens": 30}
    requests = [make_request(0, PROMPT, **rules), make_request(7, PROMPT, min_tokens=4, max_tokens=9)]
    sequences = [[*PROMPT, *[ONLY] * 9]]
    oracle = partial(OracleDrafter, sequences=sequences, hit_rate=1.0, vocab_size=VOCAB_SIZE, log=Accepted())
    prefill = build_fake_rank("prefill")
    decode = build_fake_rank("decode", max_drafts=max_drafts, make_drafter=oracle if max_drafts else None)
    with LogLines("prefill-0") as of_prefill, LogLines("decode-0") as of_decode:
        answers = answer_all(prefill.engine, decode.engine, requests)
    assert answers[0].token_ids == [ONLY] * 5
    counts = [rank.recorder.get("deepinfer_fallback_tokens") for rank in (prefill, decode)]
    assert counts == [1, 3]
    for lines in (of_prefill, of_decode):
        [line] = lines.lines
        assert " min_tokens or bad words leave none of the allowed tokens" in line
        assert line.endswith(" request=request-0")
