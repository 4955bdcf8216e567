"""What a rank engine has put on its stream and not read yet, in the order of the stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.models.model_spec import KVPart
from deepinfer.platforms.platform import Piece
from deepinfer.runtime.kv_transfer import HeldKV
from deepinfer.runtime.pending_output import PendingOutput
from deepinfer.runtime.piece_arena import Piece as ArenaPiece
from deepinfer.scheduler.step_plan import StepPlan
from deepinfer.scheduler.step_results import Prefilled


@dataclass(slots=True)
class StepInFlight:
    """A plan and its two pieces, both None when the group ran no step then, because nobody had rows.

    `start` runs the rows. `finish` draws the tokens; it is None until the masks that it needs have been built.
    """

    plan: StepPlan
    start: Piece[None] | None = None
    finish: Piece[PendingOutput] | None = None

    def is_ready(self) -> bool:
        """True when it can be read without a wait; a step that was launched is read in its turn only."""
        return self.start is None


@dataclass(slots=True)
class ImportInFlight:
    """KV on its way into the caches; `kept` holds on to what the device reads."""

    piece: Piece[None]
    num_bytes: int
    kept: HeldKV

    def is_ready(self) -> bool:
        """True when it can be read without a wait."""
        return self.piece.done()


@dataclass(slots=True)
class ExportInFlight:
    """KV on its way out of the caches; `prefilled` is published with it.

    With `place` it goes there, and its sums come to the host.
    """

    prefilled: Prefilled
    piece: Piece[tuple[tuple[KVPart, ...], Tensor | None]]
    place: ArenaPiece | None = None

    def is_ready(self) -> bool:
        """True when it can be read without a wait."""
        return self.piece.done()


InFlight = StepInFlight | ImportInFlight | ExportInFlight
