"""Survival and its calibration."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.speculative.confidence import calibration_error, fit_temperatures, survival


def test_survival_is_the_product_of_chances() -> None:
    chances = survival(np.array([[0.0, np.log(3.0)]]), (1.0, 1.0))
    assert chances.tolist() == [pytest.approx([0.5, 0.375])]
    assert survival(np.array([2.0]), (2.0,)) == pytest.approx(1 / (1 + np.exp(-1.0)))
    assert np.isfinite(survival(np.array([1e6, -1e6]), (1.0, 1.0))).all()


@pytest.mark.parametrize("truth", [(0.5, 2.0), (1.0, 1.0), (3.0, 0.7)])
def test_temperatures_are_found_again(truth: tuple[float, float]) -> None:
    numbers = np.random.default_rng(4)
    log_odds = numbers.normal(1.0, 2.0, (40_000, 2))
    chances = 1 / (1 + np.exp(-log_odds / np.array(truth)))
    accepted = (numbers.random((40_000, 2)) < chances).cumprod(1).sum(1)
    found = fit_temperatures(log_odds, np.full(40_000, 2), accepted)
    assert found == pytest.approx(truth, rel=0.12)


def test_positions_with_few_outcomes_keep_their_scale() -> None:
    log_odds = np.full((300, 3), 2.0)
    drafted = np.array([3] * 100 + [1] * 200)
    found = fit_temperatures(log_odds, drafted, np.zeros(300, np.int64))
    assert found[0] == pytest.approx(4.0)
    assert found[1:] == (1.0, 1.0)


def test_calibration_error() -> None:
    happened = np.array([True] * 9 + [False])
    assert calibration_error(np.full(10, 0.9), happened) == pytest.approx(0.0, abs=1e-9)
    assert calibration_error(np.full(10, 0.4), happened) == pytest.approx(0.5)
