"""A decode rank's way to hand-overs that lie in memory of prefill ranks: each is fetched as a whole, at once.

So when a fetch has returned, nobody reads the prefill rank's memory for it any more.
"""

from __future__ import annotations

import torch

from deepinfer.errors import RequestError
from deepinfer.platforms.memory_handle import UnreachableMemoryError
from deepinfer.platforms.platform import Platform
from deepinfer.platforms.transfer import to_host
from deepinfer.protocol import KVHandle, KVPlace
from deepinfer.runtime.kv_transfer import check_shape, check_sums, piece_sums
from deepinfer.runtime.piece_arena import LentPiece, PieceArena, padded


class KVIntake:
    """Copies hand-overs into pieces of `arena` on a stream of its own, or into host memory where that has no room.

    `fetch` and `forget` are for one thread at a time.
    """

    def __init__(self, platform: Platform, name: str, arena: PieceArena | None) -> None:
        """`name` names the stream's thread."""
        self._platform = platform
        self._stream = platform.open_stream(name)
        self._arena = arena
        self._mapped: dict[int, tuple[bytes, torch.Tensor]] = {}  # by prefill rank: its memory, of its present life

    def fetch(self, handle: KVHandle, *, layout_digest: str) -> LentPiece | torch.Tensor:
        """Return a checked copy of what lies at the handle's place.

        Raises RequestError: "rank_lost" when the prefill rank has died, "kv_unreachable" when its memory can't be
        opened for another reason, and what `check_handover` raises.
        """
        assert handle.place is not None, handle.request_id
        check_shape(handle, handle.nbytes, layout_digest=layout_digest)
        place = handle.place
        copied = self._stream.submit(lambda: self._copy(handle, place)).result()
        if isinstance(copied, UnreachableMemoryError):
            code = "rank_lost" if copied.owner_is_gone else "kv_unreachable"
            raise RequestError(f"the KV of prefill rank {handle.source_rank} is out of reach: {copied}", code=code)
        kept, sums = copied
        check_sums(handle, (piece_sums(kept) if isinstance(kept, torch.Tensor) else sums).tolist())
        return kept

    def forget(self) -> None:
        """Unmap the memory of all prefill ranks; what is fetched later maps it anew."""
        self._stream.submit(self._mapped.clear).result()

    def close(self) -> None:
        """End the stream's thread."""
        self._stream.close()

    # ---- the stream's thread. A piece that raises would break the stream, so what may go wrong is returned.

    def _copy(
        self, handle: KVHandle, place: KVPlace
    ) -> tuple[LentPiece | torch.Tensor, torch.Tensor] | UnreachableMemoryError:
        """Return the copy and, if it lies on the device, its sums; or why there is none."""
        try:
            return self._copied(handle, place)
        except UnreachableMemoryError as error:
            return error
        except Exception as error:  # whatever it is, the KV can come through the host
            reason = (str(error).splitlines() or [""])[0]
            return UnreachableMemoryError(f"{type(error).__name__}: {reason}", owner_is_gone=False)

    def _copied(self, handle: KVHandle, place: KVPlace) -> tuple[LentPiece | torch.Tensor, torch.Tensor]:
        mapped = self._map(handle.source_rank, place.memory)
        source = mapped[place.offset : place.offset + padded(handle.nbytes)]
        try:
            piece = None if self._arena is None else self._arena.reserve(handle.nbytes)
            if self._arena is not None and piece is not None:
                lent = LentPiece(self._arena, piece)
                lent.data.copy_(source)
                return lent, to_host(piece_sums(lent.data))
        except torch.OutOfMemoryError:
            pass  # the sums need some, and other work may have taken it
        return to_host(source), torch.empty(0)

    def _map(self, rank: int, memory: bytes) -> torch.Tensor:
        known = self._mapped.pop(rank, None)
        if known is None or known[0] != memory:
            known = None  # closes the memory of an earlier life before that of the present one is opened
            known = memory, self._platform.open_memory(memory)
        self._mapped[rank] = known
        return known[1]
