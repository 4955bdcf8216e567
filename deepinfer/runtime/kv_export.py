"""A prefill rank's way of handing KV over: into its device's memory that others can open, or else into the host's."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from deepinfer.codec import unpack
from deepinfer.models.model_spec import KVPart
from deepinfer.platforms.platform import Stream
from deepinfer.protocol import KVHandle, PrefillBatch
from deepinfer.runtime.in_flight import ExportInFlight
from deepinfer.runtime.kv_transfer import Buffer, describe_piece, pack_parts, seal_piece
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.piece_arena import PieceArena
from deepinfer.scheduler.step_results import Prefilled


class _Facts(TypedDict):
    request_id: str
    source_rank: int
    num_tokens: int
    layout_digest: str


class KVExport:
    """Used by the step thread. Pieces of `arena`, None: there is none, are given back by the driver's word."""

    def __init__(
        self, runner: ModelRunner, stream: Stream, arena: PieceArena | None, *, rank: int, layout_digest: str
    ) -> None:
        """Hand over through the host until the driver says that memory of the device is in reach."""
        self._runner = runner
        self._stream = stream
        self._arena = arena
        self._rank = rank
        self._layout_digest = layout_digest
        self._uses_device = False
        self._num_on_device = 0
        self._num_through_host = 0

    def counts(self) -> dict[str, int]:
        """Return how many hand-overs went which way, and how many `lie` on the device now; any thread."""
        num_held = 0 if self._arena is None else self._arena.num_held
        return {"device": self._num_on_device, "host": self._num_through_host, "lie": num_held}

    def follow(self, message: PrefillBatch) -> None:
        """Take pieces back, all of them when everything is given up: a new driver gives back those that come late."""
        if self._arena is None:
            return
        self._uses_device = message.device_handover
        if message.drops_all:
            self._arena.release_all()
        self._arena.release(unpack(message.released).tolist())

    def submit(self, prefilled: Prefilled) -> ExportInFlight:
        """Put the gathering of a prompt's KV on the stream."""
        num_bytes = self._runner.kv_bytes(prefilled.num_tokens)
        place = self._arena.reserve(num_bytes) if self._arena is not None and self._uses_device else None

        def gather() -> tuple[tuple[KVPart, ...], Tensor | None]:
            parts = self._runner.export_kv(
                slot=prefilled.slot,
                block_ids=prefilled.block_ids,
                num_tokens=prefilled.num_tokens,
                into=None if place is None else place.data,
            )
            return parts, None if place is None else seal_piece(place.data, num_bytes)

        return ExportInFlight(prefilled, self._stream.submit(gather), place)

    def finish(self, entry: ExportInFlight) -> tuple[KVHandle, Buffer | None]:
        """Wait for the device and return what is handed over; without a buffer it lies at the handle's place."""
        parts, sums = entry.piece.result()
        facts = _Facts(
            request_id=entry.prefilled.request.request_id,
            source_rank=self._rank,
            num_tokens=entry.prefilled.num_tokens,
            layout_digest=self._layout_digest,
        )
        if self._arena is None or entry.place is None or sums is None:
            self._num_through_host += 1
            return pack_parts(parts, **facts)
        self._num_on_device += 1
        memory = self._arena.handle
        return describe_piece(parts, **facts, memory=memory, piece=entry.place, sums=sums.tolist()), None
