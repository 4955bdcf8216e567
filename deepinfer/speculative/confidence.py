"""From log-odds to survival: calibration by sequential temperature scaling, from outcomes seen on this rank.

A temperature per draft position divides the log-odds. They are fitted one after the other, each so that the product of
the probabilities up to it is as often right as it says (expected calibration error), as in the DSpark paper; grid and
bins are our own choice.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from deepinfer.scheduler.step_plan import Float32Array

_GRID = np.geomspace(0.25, 4.0, 61)
_NUM_BINS = 15
_MIN_OUTCOMES = 256  # of a position, before its temperature is fitted
_MAX_OUTCOMES = 2048
_REFIT_EVERY = 512

Floats = npt.NDArray[np.float64]


def survival(log_odds: npt.ArrayLike, temperatures: tuple[float, ...]) -> Floats:
    """Return [..., K]: the chance that draft k and all before it are accepted."""
    scaled = np.asarray(log_odds, np.float64) / np.asarray(temperatures)
    return np.cumprod(1.0 / (1.0 + np.exp(-np.clip(scaled, -60, 60))), axis=-1)


def fit_temperatures(
    log_odds: Floats, num_drafted: npt.NDArray[np.int64], num_accepted: npt.NDArray[np.int64]
) -> tuple[float, ...]:
    """Return K temperatures from `log_odds` [n, K] of drafts, `num_drafted` [n] of which were verified.

    Position k learns from the passes that verified draft k; with too few of them it keeps 1.
    """
    num_positions = log_odds.shape[1]
    temperatures = [1.0] * num_positions
    for position in range(num_positions):
        seen = num_drafted > position
        if seen.sum() < _MIN_OUTCOMES:
            break
        before = np.ones(int(seen.sum()))
        if position:
            before = survival(log_odds[seen, :position], tuple(temperatures[:position]))[:, -1]
        survived = num_accepted[seen] > position
        own = log_odds[seen, position, None] / _GRID
        predicted = before[:, None] / (1.0 + np.exp(-np.clip(own, -60, 60)))
        errors = [calibration_error(predicted[:, column], survived) for column in range(len(_GRID))]
        temperatures[position] = float(_GRID[int(np.argmin(errors))])
    return tuple(temperatures)


def calibration_error(predicted: Floats, happened: npt.NDArray[np.bool_]) -> float:
    """Expected calibration error: mean distance of prediction and frequency over equal bins, weighted by their size."""
    bins = np.minimum((predicted * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    sums = np.bincount(bins, predicted, _NUM_BINS) - np.bincount(bins, happened.astype(np.float64), _NUM_BINS)
    return float(np.abs(sums).sum() / len(predicted))


class Calibrator:
    """Keeps the newest outcomes and refits now and then."""

    def __init__(self, max_drafts: int) -> None:
        """Start uncalibrated: every temperature is 1."""
        self.temperatures: tuple[float, ...] = (1.0,) * max_drafts
        self._outcomes: deque[tuple[Float32Array, int, int]] = deque(maxlen=_MAX_OUTCOMES)
        self._num_new = 0

    def add(self, log_odds: Float32Array, *, num_drafted: int, num_accepted: int) -> None:
        """Log one pass: the `log_odds` [K] of its drafts, how many were verified and how many accepted."""
        if num_drafted == 0:
            return
        self._outcomes.append((log_odds, num_drafted, num_accepted))
        self._num_new += 1
        if self._num_new >= _REFIT_EVERY:
            self._num_new = 0
            columns = list(zip(*self._outcomes, strict=True))
            self.temperatures = fit_temperatures(
                np.array(columns[0], np.float64), np.array(columns[1]), np.array(columns[2])
            )
