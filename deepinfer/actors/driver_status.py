"""What a driver says of its ranks: what they are, and the numbers that they reported last, with the age of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from deepinfer.protocol import RankLoad, RankReady, Role


class LoadBook:
    """The last reported load of every rank. Ranks report with their results, so an idle one's numbers grow old."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without reports."""
        self._clock = clock
        self._loads: dict[tuple[Role, int], tuple[RankLoad, float]] = {}

    def take(self, role: Role, load: RankLoad) -> None:
        """Note a report."""
        self._loads[role, load.rank] = load, self._clock()

    def drop(self, role: Role) -> None:
        """Forget the reports of a role whose ranks are gone."""
        self._loads = {key: entry for key, entry in self._loads.items() if key[0] != role}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return every load by the rank's name, with `age_seconds`."""
        now = self._clock()
        return {
            f"{role}-{rank}": {**msgspec.to_builtins(load), "age_seconds": round(now - reported_at, 1)}
            for (role, rank), (load, reported_at) in self._loads.items()
        }


def describe_ranks(ranks: Sequence[RankReady], num_loads: Mapping[Role, int]) -> dict[str, dict[str, Any]]:
    """Return what the ranks are, by name. `num_loads`: how often a role's weights have been loaded."""
    return {
        f"{ready.role}-{ready.rank}": {
            "node": ready.node,
            "device": ready.device,
            "pid": ready.pid,
            "num_loads": num_loads[ready.role],
            "num_blocks": ready.num_blocks,
        }
        for ready in ranks
    }
