"""Where a sequence ends, also inside a run of accepted drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from deepinfer.protocol import FinishCode, OutputFormat, SamplingParams
from deepinfer.scheduler.stopping import StopChecker, StopDecision
from deepinfer.tokenizer import OutputParser, Tokenizer

EOS = 1


@dataclass
class _Piece:
    stopped: bool


class _Reader:
    """Text of token t is the letter chr(t); stops once the text holds `stop`."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.text = ""

    def push(self, token_id: int) -> _Piece:
        assert type(token_id) is int
        self.text += chr(token_id)
        return _Piece(self.stop in self.text)


def _checker(
    *, num_prompt_tokens: int = 5, max_model_len: int = 1000, output: Sequence[int] = (), **fields: object
) -> StopChecker:
    params = SamplingParams(max_tokens=100, **fields) if "max_tokens" not in fields else SamplingParams(**fields)  # type: ignore[arg-type]
    return StopChecker(
        params,
        eos_token_id=EOS,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=max_model_len,
        output_token_ids=output,
        build_reader=lambda: _Reader(params.stop[0]),
    )


def test_the_end_token_is_kept_and_cuts_the_run() -> None:
    checker = _checker()
    assert checker.check([7, 8]) == StopDecision(2, FinishCode.NONE)
    assert checker.check([7, EOS, 8, 9]) == StopDecision(2, FinishCode.STOP)


def test_a_stop_id_ends_like_the_end_token() -> None:
    assert _checker(stop_token_ids=(9,)).check([7, 9, 8]) == StopDecision(2, FinishCode.STOP)


def test_ignore_eos_leaves_stop_ids_in_force() -> None:
    checker = _checker(ignore_eos=True, stop_token_ids=(9,))
    assert checker.check([EOS, EOS, 9]) == StopDecision(3, FinishCode.STOP)
    assert _checker(ignore_eos=True).check([EOS, 3]) == StopDecision(2, FinishCode.NONE)


@pytest.mark.parametrize(("min_tokens", "num_kept"), [(0, 1), (1, 2), (2, 3)])
def test_ids_count_only_behind_min_tokens(min_tokens: int, num_kept: int) -> None:
    assert _checker(min_tokens=min_tokens).check([EOS] * 5) == StopDecision(num_kept, FinishCode.STOP)


def test_max_tokens_cuts_the_run() -> None:
    checker = _checker(max_tokens=4)
    assert checker.check([7, 7, 7]) == StopDecision(3, FinishCode.NONE)
    assert checker.check([7, 7, 7]) == StopDecision(1, FinishCode.LENGTH)


def test_the_context_limit_cuts_the_run() -> None:
    checker = _checker(num_prompt_tokens=997)
    assert checker.check([7, 7, 7, 7]) == StopDecision(3, FinishCode.LENGTH)


def test_stop_wins_over_length_at_the_same_token() -> None:
    assert _checker(max_tokens=2).check([7, EOS]) == StopDecision(2, FinishCode.STOP)


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_stop_string_is_found_however_the_run_is_cut(cut: int) -> None:
    """P17: also by a cut inside the string and at a string that a run completes with its first token."""
    tokens = [ord(letter) for letter in "abcdefg"]
    checker = _checker(stop=("de",))
    kept: list[int] = []
    for start in range(0, len(tokens), cut):
        decision = checker.check(np.array(tokens[start : start + cut], np.int32))
        kept += tokens[start : start + decision.num_kept]
        if decision.code is FinishCode.STOP:
            break
    assert kept == tokens[:5]


def test_a_replay_goes_on_where_it_was() -> None:
    checker = _checker(output=[ord("a"), ord("b")], stop=("bc",), max_tokens=10)
    assert checker.check([ord("c"), ord("d")]) == StopDecision(1, FinishCode.STOP)
    assert _checker(output=[7, 7], min_tokens=2).check([EOS]) == StopDecision(1, FinishCode.STOP)


def test_a_reader_is_built_only_for_stop_strings() -> None:
    def build() -> _Reader:
        raise AssertionError("not needed")

    StopChecker(SamplingParams(), eos_token_id=EOS, num_prompt_tokens=1, max_model_len=9, build_reader=build).check([4])


@pytest.mark.parametrize("stop", ["lo w", "o", "world"])
def test_the_tokens_reader_finds_stop_strings(stop: str) -> None:
    """With the class that the client uses as well: the run is cut at the token that completes the stop string."""
    tokenizer = Tokenizer.from_directory(Path(__file__).parents[1] / "golden" / "w16")
    token_ids = tokenizer.encode_text("hello world, hello")
    params = SamplingParams(stop=(stop,), max_tokens=100)
    checker = StopChecker(
        params,
        eos_token_id=tokenizer.eos_token_id,
        num_prompt_tokens=1,
        max_model_len=100,
        build_reader=lambda: OutputParser(tokenizer, OutputFormat(), stop=params.stop),
    )
    num_kept, code = checker.check(token_ids)
    assert code is FinishCode.STOP
    assert stop in tokenizer.decode(token_ids[:num_kept])
    assert stop not in tokenizer.decode(token_ids[: num_kept - 1])
