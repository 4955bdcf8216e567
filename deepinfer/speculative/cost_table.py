"""What a step costs on this machine, measured: seconds by number of sequences and drafts per sequence."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from deepinfer.errors import ConfigError


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`seconds[i][j]`: a step of `num_sequences[i]` sequences that verify `num_drafts[j]` drafts each, and draft again.

    Both lists ascend; `num_drafts` begins with 0. `plain_seconds[i]`: the step neither verifies nor drafts; what it
    saves against `seconds[i][0]` is the cost of drafting. Between entries a cost is interpolated, beyond the last
    number of sequences it grows in proportion.
    """

    num_sequences: tuple[int, ...]
    num_drafts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    plain_seconds: tuple[float, ...]

    def step_seconds(self, num_sequences: int, num_drafts: float) -> float:
        """Return the cost of a step with `num_drafts` drafts per sequence on average."""
        return self._between_sizes(num_sequences, lambda row: self._at(row, num_drafts))

    def plain_step_seconds(self, num_sequences: int) -> float:
        """Return the cost of a step that neither verifies drafts nor makes any."""
        return self._between_sizes(num_sequences, lambda row: self.plain_seconds[row])

    def _between_sizes(self, num_sequences: int, at: Callable[[int], float]) -> float:
        largest = self.num_sequences[-1]
        if num_sequences > largest:
            return at(len(self.num_sequences) - 1) * num_sequences / largest
        above = min(bisect_right(self.num_sequences, num_sequences), len(self.num_sequences) - 1)
        below = max(above - 1, 0)
        return _between(num_sequences, (self.num_sequences[below], at(below)), (self.num_sequences[above], at(above)))

    def _at(self, row: int, num_drafts: float) -> float:
        above = min(bisect_right(self.num_drafts, num_drafts), len(self.num_drafts) - 1)
        below = max(above - 1, 0)
        costs = self.seconds[row]
        return _between(num_drafts, (self.num_drafts[below], costs[below]), (self.num_drafts[above], costs[above]))


def _between(place: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    if high[0] == low[0]:
        return low[1]
    share = min(max((place - low[0]) / (high[0] - low[0]), 0.0), 1.0)
    return low[1] + share * (high[1] - low[1])


def table_path(cache_dir: Path, key: Mapping[str, object]) -> Path:
    """Return where the table of a rank lives; `key` is everything that its costs depend on."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return cache_dir / "step_costs" / f"{digest}.json"


def read_table(path: Path) -> CostTable | None:
    """Return the table at `path`; None if there is none, or no readable one: then it has to be measured again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostTable)
    except (OSError, msgspec.MsgspecError):
        return None


def write_table(path: Path, table: CostTable) -> None:
    """Write `table` whole or not at all; ranks of a host may write the same file at once."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.encode(table))
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"can't keep the measured step costs in {path.parent}: {error}", path="cache_dir") from error
