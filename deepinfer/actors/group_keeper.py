"""Keeps one role's group running: polls its ranks, and starts it again, a limited number of times, when it is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from deepinfer import codec
from deepinfer.actors.adoption import FoundGroup, end_group
from deepinfer.actors.rank_life import RankFacts, RankProgress
from deepinfer.actors.supervisor import EnginePlan, RankGroup
from deepinfer.errors import ClusterError, DeepInferError, RankError, SupersededError
from deepinfer.log import get_logger
from deepinfer.protocol import DecodeResult, PrefillResult, Role

# Waits before the first and the second restart. A group that then lives long may be restarted as often again.
RESTART_DELAYS_SECONDS = (1.0, 5.0)
_LONG_LIFE_SECONDS = 600.0


class GroupOwner(Protocol):
    """What the driver does with the news of a group."""

    def on_result(self, result: PrefillResult | DecodeResult, references: Sequence[ObjectRef]) -> None:
        """A rank has results; `references` are the hand-overs of a prefill result."""
        ...

    def on_lost(self, error: RankError) -> None:
        """The group is gone with everything on it, and will be started again."""
        ...

    def on_restarted(self, facts: Sequence[RankFacts]) -> None:
        """The group runs again."""
        ...

    def gather_seconds(self) -> float:
        """How long a rank shall gather results before it answers."""
        ...


class GroupKeeper:
    """One role's group over all its lives. `reserve` and `start` once, then `keep` as a task, `stop` at the end.

    `first_index`: above all sequences that ranks have seen from an earlier driver. `num_restarts` are this driver's.
    """

    def __init__(self, role: Role, plan: EnginePlan, owner: GroupOwner) -> None:
        """Prepare the first group; nothing is started."""
        self._role: Role = role
        self._plan = plan
        self._owner = owner
        self._group = RankGroup(role, plan, number=1)
        self._adopted: list[RankFacts] | None = None
        self._blamed: asyncio.Future[RankError]
        self._stopping = False
        self._logger = get_logger(f"{role}-group")
        self.first_index = 0
        self.num_restarts = 0

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """The ranks of the present group, by rank."""
        return self._group.actors

    @property
    def num_loads(self) -> int:
        """How often the weights of this role have been loaded, by this driver and those before it."""
        return self._group.number

    async def reserve(self, found: FoundGroup | None) -> None:
        """Take over the ranks in `found` if possible, else end them and take places for new ones.

        None: no earlier driver has left anything. Raises ConfigError or ClusterError.
        """
        if found is not None:
            if found.actors:
                self._adopted = await self._adopt(found)
            if self._adopted is not None:
                return
            await asyncio.to_thread(end_group, self._plan.name, found, namespace=self._plan.config.ray.namespace)
            self._group = RankGroup(self._role, self._plan, number=found.number + 1)
        await self._group.reserve()

    async def start(self) -> list[RankFacts]:
        """Return what the ranks are: those that were taken over, or new ones; see `RankGroup.start`."""
        return self._adopted or await self._group.start()

    async def phases(self) -> dict[str, str]:
        """Return the start phase of every rank."""
        return await self._group.phases()

    async def keep(self) -> None:
        """Serve the group until `stop`; raises ClusterError when it can't be kept running."""
        recent_restarts = 0
        while True:
            begin = time.monotonic()
            error = await self._serve()
            self._group.kill()
            if self._stopping:
                return
            if error is None:
                error = RankError("ended without an order", role=self._group.role, rank=0)
            self._logger.error("the group is lost: %s", error)
            if time.monotonic() - begin > _LONG_LIFE_SECONDS:
                recent_restarts = 0
            if recent_restarts == len(RESTART_DELAYS_SECONDS):
                raise ClusterError(f"{error}; the group was restarted {recent_restarts} times before, giving up")
            self._owner.on_lost(error)
            await asyncio.sleep(RESTART_DELAYS_SECONDS[recent_restarts])
            recent_restarts += 1
            await self._restart(error)

    async def stop(self) -> None:
        """End the group in order."""
        self._stopping = True
        await self._group.stop()

    def release(self) -> None:
        """Leave the ranks to another driver, which has taken them over."""
        self._stopping = True
        self._group.release()

    def kill(self) -> None:
        """End the group now."""
        self._stopping = True
        self._group.kill()

    async def _adopt(self, found: FoundGroup) -> list[RankFacts] | None:
        obstacle = found.obstacle(self._plan.source, self._group.num_ranks)
        if obstacle is None:
            try:
                facts, self.first_index = await self._group.adopt(found)
                self._logger.info("took over %d loaded ranks", len(facts))
                return facts
            except SupersededError:
                raise
            except DeepInferError as error:
                obstacle = str(error)
        self._logger.warning("the %s ranks can't be taken over: %s; the group is started again", self._role, obstacle)
        return None

    async def _restart(self, lost: RankError) -> None:
        self._group = RankGroup(self._role, self._plan, number=self._group.number + 1)
        self.num_restarts += 1
        try:
            await self._group.reserve()
            facts = await self._group.start()
        except DeepInferError as error:
            raise ClusterError(f"{lost}; and the group did not start again: {error}") from error
        self._owner.on_restarted(facts)

    def blame(self, rank: int, actor: ActorHandle[Any], error: RayTaskError) -> None:
        """A call to `actor`, which is or was `rank`, raised: a present group is then treated as lost.

        Raises SupersededError when it said that another driver has taken over.
        """
        if isinstance(error.cause, SupersededError):
            raise error.cause
        if self._group.actors[rank : rank + 1] == [actor] and not self._blamed.done():
            cause = error.cause
            self._logger.error("a call to rank %d raised:\n%s", rank, error)
            self._blamed.set_result(RankError(f"{type(cause).__name__}: {cause}", role=self._group.role, rank=rank))

    async def _serve(self) -> RankError | None:
        """Poll all ranks until the group fails or ends."""
        group = self._group
        group.begin_polls()
        self._blamed = asyncio.get_running_loop().create_future()
        failure = asyncio.create_task(group.failure())
        polls = [asyncio.create_task(self._poll(group, rank)) for rank in range(group.num_ranks)]
        try:
            ends: list[asyncio.Future[Any]] = [failure, self._blamed, *polls]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._blamed.done():
                return self._blamed.result()
            for task in done:
                task.result()  # a poll that broke while it handled a result breaks the driver
            return failure.result()
        finally:
            for task in (failure, *polls):
                task.cancel()

    async def _poll(self, group: RankGroup, rank: int) -> None:
        """Hold one long poll open at the rank at any time, until a call fails."""
        actor = group.actors[rank]
        while True:
            try:
                answer = await actor.next_results.remote(group.epoch, self._owner.gather_seconds())
            except RayTaskError as error:
                self.blame(rank, actor, error)
                return
            except RayError:
                # The group's own watch finds out what it was; a poll must only not spin until then.
                await asyncio.sleep(1.0)
                continue
            data, references, progress = answer
            assert isinstance(progress, RankProgress)
            group.seen(rank, progress)
            if data:
                message = codec.decode(data)
                assert isinstance(message, PrefillResult | DecodeResult), type(message)
                self._owner.on_result(message, references)
