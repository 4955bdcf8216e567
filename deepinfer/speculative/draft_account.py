"""Whether drafting pays on this rank: what accepted drafts saved, against what it cost to make and verify them.

Outcomes are judged over short trials. After one that lost time nothing is drafted for so long that the loss stays a
small share of the time; then the next trial shows whether the text has become predictable. In a group one rank's trial
is everyone's.
"""

from __future__ import annotations

from deepinfer.speculative.cost_table import CostTable

_MIN_STEPS = 4  # of a trial; the first one has nothing to verify
_MIN_PASSES = 8  # of sequences in a trial
_LOSS_SHARE = 0.01  # most of the time that lost trials may take


class DraftAccount:
    """Follows one rank's decode steps. Only earlier outcomes count, never the drafts that a step is about to verify."""

    def __init__(self, costs: CostTable) -> None:
        """The first trial begins at once."""
        self._costs = costs
        self._rest_seconds = 0.0
        self._begin_trial(0.0)

    @property
    def wants_drafts(self) -> bool:
        """Whether the next step should draft."""
        return self._rest_seconds <= 0

    def rest(self, num_sequences: int) -> None:
        """Take note of a planned step that drafts nothing."""
        self._rest_seconds -= self._costs.plain_step_seconds(num_sequences)
        self._begin_trial(0.0)

    def add(self, num_sequences: int, *, num_drafted: int, num_accepted: int) -> None:
        """Take in the outcome of a step that drafted: its drafts that were verified and accepted, over all sequences.

        At the end of a trial half of what it gained is kept, so that one bad trial among good ones ends nothing.
        """
        plain = self._costs.plain_step_seconds(num_sequences)
        spent = self._costs.step_seconds(num_sequences, num_drafted / num_sequences) - plain
        self._gained_seconds += plain * num_accepted / num_sequences - spent
        self._num_steps += 1
        self._num_passes += num_sequences
        if self._num_steps >= _MIN_STEPS and self._num_passes >= _MIN_PASSES:
            self._rest_seconds = max(-self._gained_seconds, 0.0) / _LOSS_SHARE
            self._begin_trial(max(self._gained_seconds, 0.0) / 2)

    def _begin_trial(self, gained_seconds: float) -> None:
        self._gained_seconds = gained_seconds
        self._num_steps = self._num_passes = 0
