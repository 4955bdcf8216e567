"""Where the buffers of a pushed exchange lie in a rank's memory; see `push_dispatcher`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deepinfer.distributed.token_dispatcher import ExchangeShape

MAX_PUSH_RANKS: Final = 8  # buffers grow with ranks times rows
FLAG_BYTES: Final = 8
ID_BYTES: Final = 8
WEIGHT_BYTES: Final = 4
_ALIGNMENT = 256


@dataclass(slots=True, frozen=True)
class Region:
    """Where the buffers of one shape begin, in bytes from the beginning of a rank's memory; `end` is behind them."""

    shape: ExchangeShape
    rows: int
    ids: int
    weights: int
    answers: int
    end: int


def lay_out(shapes: Sequence[ExchangeShape], num_ranks: int) -> list[Region]:
    """Place the buffers of each shape behind the flags."""
    regions: list[Region] = []
    end = _aligned(num_ranks * FLAG_BYTES)
    for shape in shapes:
        places = num_ranks * shape.max_rows
        rows = end
        ids = rows + _aligned(places * shape.row_bytes)
        weights = ids + _aligned(places * shape.columns * ID_BYTES)
        answers = weights + _aligned(places * shape.columns * WEIGHT_BYTES)
        end = answers + _aligned(shape.max_rows * shape.columns * shape.answer_bytes)
        regions.append(Region(shape, rows, ids, weights, answers, end))
    return regions


def link_bytes(shapes: Sequence[ExchangeShape], num_ranks: int) -> int:
    """Return the bytes of memory that a link of `num_ranks` ranks takes on each of them."""
    return lay_out(shapes, num_ranks)[-1].end


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
