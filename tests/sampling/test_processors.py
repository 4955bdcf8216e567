"""Rules and truncation on single rows, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from support.token_rows import admit
from torch import Tensor

from deepinfer.protocol import SamplingParams
from deepinfer.sampling.processors import apply_rules, integer_masses, log_normalizers, truncate
from deepinfer.sampling.state import SamplingState

VOCAB_SIZE = 6
INF = math.inf


def _rules(
    scores: list[float],
    *,
    prompt: list[int],
    output: list[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
    shorter: bool = False,
    **fields: object,
) -> list[float]:
    state = SamplingState(2, VOCAB_SIZE, torch.device("cpu"), eos_token_id=1)
    params = SamplingParams(seq_seed=0, **fields)  # type: ignore[arg-type]
    admit(state, 1, params, num_prompt_tokens=len(prompt), bad_word_ids=bad_words)
    history = [*prompt, *output]
    rows = torch.tensor([scores, scores], dtype=torch.float32)
    # The second row sees all but the last token; what stands behind a row's position is not its history.
    positions = torch.tensor([len(history), max(len(prompt), len(history) - 1)])
    apply_rules(rows, state.rules[1], torch.tensor([*history, 2, 3, 4], dtype=torch.int32), positions)
    if output and not shorter:
        assert rows[1].tolist() == _rules(
            scores, prompt=prompt, output=output[:-1], bad_words=bad_words, shorter=True, **fields
        )
    return rows[0].tolist()


def test_allowed_ids() -> None:
    assert _rules([1, 2, 3, 4, 5, 6], prompt=[0], output=[], allowed_token_ids=(2, 4)) == [-INF, -INF, 3, -INF, 5, -INF]


def test_logit_bias() -> None:
    assert _rules([0, 1, 2, 3, 4, 5], prompt=[0], output=[], logit_bias={0: -100.0, 5: 2.5}) == [-100, 1, 2, 3, 4, 7.5]


@pytest.mark.parametrize(("num_output", "held_back"), [(0, True), (2, True), (3, False)])
def test_min_tokens_holds_back_eos_and_stop_ids(num_output: int, held_back: bool) -> None:
    row = _rules([0.0] * 6, prompt=[0, 0], output=[5] * num_output, min_tokens=3, stop_token_ids=(4,))
    assert row == ([0, -INF, 0, 0, -INF, 0] if held_back else [0.0] * 6)


def test_ignored_eos_is_an_ordinary_token_for_min_tokens() -> None:
    row = _rules([0.0] * 6, prompt=[0], output=[], min_tokens=3, ignore_eos=True, stop_token_ids=(4,))
    assert row == [0, 0, 0, 0, -INF, 0]


def test_repetition_counts_prompt_and_output() -> None:
    row = _rules([2, -2, 0.5, -0.5, 2, 0], prompt=[0, 0, 1], output=[2, 3, 5], repetition_penalty=2.0)
    assert row == [1, -4, 0.25, -1, 2, 0]


def test_presence_and_frequency_count_output_only() -> None:
    row = _rules([0.0] * 6, prompt=[0, 1], output=[2, 3, 3, 3], presence_penalty=0.5, frequency_penalty=0.25)
    assert row == [0, 0, -0.75, -1.25, 0, 0]


def test_bias_comes_before_penalties() -> None:
    row = _rules([1, 0, 0, 0, 0, 0], prompt=[0], output=[0], logit_bias={0: -2.0}, repetition_penalty=2.0)
    assert row[0] == -2.0  # (1 - 2) * 2, and not 1 / 2 - 2


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], {5}), ([2], {3, 5}), ([0, 2], {3, 5}), ([2, 4], {5}), ([2, 4, 2], {0, 3, 5})],
)
def test_bad_words_complete_only_behind_their_beginning(output: list[int], banned: set[int]) -> None:
    words = ((5,), (2, 3), (2, 4, 2, 0))
    row = _rules([0.0] * 6, prompt=[1, 2], output=output, bad_words=words)
    assert {index for index, value in enumerate(row) if value == -INF} == banned


def _kept(scores: list[float], *, top_k: int = 99, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    row = torch.tensor([scores], dtype=torch.float32)
    truncate(
        row,
        top_k=torch.tensor([min(top_k, len(scores))]),
        top_p=torch.tensor([top_p], dtype=torch.float64),
        log_min_p=torch.tensor([math.log(min_p) if min_p else -INF]),
        max_top_k=top_k if top_k < len(scores) else 0,
        with_top_p=top_p < 1.0,
    )
    return {index for index, value in enumerate(row[0].tolist()) if value > -INF}


def _logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_nothing_is_dropped_when_all_is_off() -> None:
    assert _kept([0, -200, 5, 3]) == {0, 1, 2, 3}


def test_top_k_keeps_ties() -> None:
    assert _kept([1, 3, 2, 2, 0], top_k=1) == {1}
    assert _kept([1, 3, 2, 2, 0], top_k=2) == {1, 2, 3}
    assert _kept([1, 3, 2, 2, 0], top_k=4) == {0, 1, 2, 3}


def test_top_p_keeps_the_token_that_crosses() -> None:
    scores = _logs(0.1, 0.4, 0.3, 0.2)
    assert _kept(scores, top_p=1e-9) == {1}
    assert _kept(scores, top_p=0.39) == {1}
    assert _kept(scores, top_p=0.41) == {1, 2}
    assert _kept(scores, top_p=0.71) == {1, 2, 3}
    assert _kept(scores, top_p=0.91) == {0, 1, 2, 3}


def test_top_p_takes_equal_tokens_by_ascending_id_and_stops_when_reached() -> None:
    assert _kept([0, 0, 0, 0], top_p=0.5) == {0, 1}
    assert _kept([0, 1, 1, 0], top_p=0.3) == {1}


def test_min_p_is_a_share_of_the_most_likely() -> None:
    scores = _logs(0.5, 0.25, 0.15, 0.1)
    assert _kept(scores, min_p=0.49) == {0, 1}
    assert _kept(scores, min_p=0.29) == {0, 1, 2}
    assert _kept([2, 2, 1], min_p=1.0) == {0, 1}


def test_top_p_sees_only_what_min_p_and_top_k_left() -> None:
    scores = _logs(0.4, 0.3, 0.2, 0.1)
    assert _kept(scores, top_p=0.55) == {0, 1}
    assert _kept(scores, top_k=2, top_p=0.55) == {0}  # 0.4 / 0.7 = 0.57
    assert _kept(scores, min_p=0.7, top_p=0.55) == {0}


def test_truncation_keeps_what_was_excluded_out() -> None:
    assert _kept([0.0, -INF, 1.0], top_k=3, top_p=0.999999) == {0, 2}


def test_rows_truncate_by_their_own_parameters() -> None:
    scores = torch.tensor(_logs(0.4, 0.3, 0.2, 0.1)).repeat(4, 1)
    truncate(
        scores,
        top_k=torch.tensor([4, 1, 4, 4]),
        top_p=torch.tensor([1.0, 1.0, 0.65, 1.0], dtype=torch.float64),
        log_min_p=torch.tensor([-INF, -INF, -INF, math.log(0.45)]),
        max_top_k=1,
        with_top_p=True,
    )
    assert (scores > -INF).sum(dim=1).tolist() == [4, 1, 2, 3]


def test_masses_sum_the_same_in_any_order() -> None:
    scores = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 8
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(integer_masses(scores)[:, order], integer_masses(scores[:, order]))
    assert torch.equal(log_normalizers(scores), log_normalizers(scores[:, order]))
    exact: Tensor = torch.logsumexp(scores.double(), dim=1)
    assert torch.allclose(log_normalizers(scores), exact, rtol=0, atol=1e-8)
