"""Sends batches to ranks, and takes back the hand-overs that got lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from deepinfer import codec
from deepinfer.actors.group_keeper import GroupKeeper
from deepinfer.log import get_logger
from deepinfer.protocol import DecodeBatch, DecodeResult, PrefillResult, RankLoad, Role
from deepinfer.scheduler.batch_scheduler import OutgoingBatch
from deepinfer.scheduler.request_state import failed_handover

OnOver = Callable[[OutgoingBatch], None]
TakeResult = Callable[[Role, PrefillResult | DecodeResult, Sequence[ObjectRef]], None]


class BatchSender:
    """Calls the ranks of all groups in the name of the driver of `epoch`."""

    def __init__(
        self, keepers: Mapping[Role, GroupKeeper], epoch: int, take_result: TakeResult, on_over: OnOver
    ) -> None:
        """Send to the ranks that `keepers` have at the time; `take_result` hears of what was lost.

        `on_over` hears once of each batch that its rank has it, with the hand-overs, or will never have it.
        """
        self._keepers = keepers
        self._epoch = epoch
        self._take_result = take_result
        self._on_over = on_over
        self._logger = get_logger("driver")

    def send(self, outgoing: OutgoingBatch) -> Coroutine[Any, Any, None]:
        """Send a batch now; the returned coroutine is over when the rank has it, or the loss has been dealt with."""
        actor = self._keepers[outgoing.role].actors[outgoing.rank]
        answer = actor.accept.remote(self._epoch, codec.encode(outgoing.batch), *outgoing.buffers)
        return self._confirm(outgoing, actor, answer)

    async def _confirm(self, outgoing: OutgoingBatch, actor: ActorHandle[Any], answer: ObjectRef) -> None:
        try:
            await self._see_through(outgoing, actor, answer)
        finally:
            self._on_over(outgoing)

    async def _see_through(self, outgoing: OutgoingBatch, actor: ActorHandle[Any], answer: ObjectRef) -> None:
        try:
            await answer
        except RayActorError:
            return  # the group's own watch sees it
        except ObjectLostError:
            batch = outgoing.batch
            assert isinstance(batch, DecodeBatch)
            self._logger.warning("%d hand-overs to decode rank %d were lost", len(batch.admitted), outgoing.rank)
            self._take_result("decode", lost_handovers(outgoing.rank, batch), ())
            rest = msgspec.structs.replace(batch, admitted=())  # admitted now, they could come behind their own abort
            answer = actor.accept.remote(self._epoch, codec.encode(rest))
            await self._see_through(OutgoingBatch("decode", outgoing.rank, rest), actor, answer)
        except RayTaskError as error:
            self._keepers[outgoing.role].blame(outgoing.rank, actor, error)


def lost_handovers(rank: int, batch: DecodeBatch) -> DecodeResult:
    """Return a result in the name of a decode rank: these sequences failed, and may be tried again."""
    return DecodeResult(
        rank=rank,
        step_id=0,
        failures=tuple(
            failure
            for admitted in batch.admitted
            for failure in failed_handover(
                admitted, kind="rank_lost", text="the prefill rank died while its KV was handed over"
            )
        ),
        load=RankLoad(rank=rank),
    )
