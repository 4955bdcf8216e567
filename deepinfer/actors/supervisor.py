"""Starts a role's ranks as a whole, watches them, and ends them as a whole.

A group lives and dies together: its ranks meet in collectives, and not every survivor notices a death. So on the first
death or hang all ranks are killed at once, in Ray and by pid; nobody waits for a collective's time-out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from deepinfer.actors.adoption import FoundGroup
from deepinfer.actors.decode_actor import DecodeRank
from deepinfer.actors.names import find_places, places_name, rank_name
from deepinfer.actors.placement import Placement, place
from deepinfer.actors.prefill_actor import PrefillRank
from deepinfer.actors.rank_actor import CONCURRENCY_GROUPS
from deepinfer.actors.rank_life import (
    Incarnation,
    RankExit,
    RankFacts,
    RankOrigin,
    RankPlace,
    RankProgram,
    RankProgress,
    RankSource,
)
from deepinfer.actors.rank_processes import kill_processes, local_processes
from deepinfer.actors.stall_watch import StallWatch
from deepinfer.config import ClusterConfig, encode_config
from deepinfer.errors import ClusterError, DeepInferError, RankError, SupersededError
from deepinfer.log import get_logger, phase
from deepinfer.protocol import Role

_ACTOR_CLASSES = {"prefill": PrefillRank, "decode": DecodeRank}
_WATCH_SECONDS = 0.5
_STOP_SECONDS = 10.0
_ADOPT_SECONDS = 30.0
_BEAT_SECONDS = 1.0
# Ranks that lose a peer fail too, some sooner than Ray reports the peer: their complaints are not the cause.
_CAUSE_SECONDS = 0.5


@dataclass(slots=True, frozen=True)
class EnginePlan:
    """What the groups of an engine are made from. `config` is resolved, `directory` holds the checkpoint.

    Ranks obey the driver of `epoch`; those of an engine that `is_shared` outlive it.
    """

    name: str
    config: ClusterConfig
    directory: str
    program: RankProgram
    epoch: int
    is_shared: bool

    @property
    def source(self) -> RankSource:
        """What every rank is told to load."""
        return RankSource(config=encode_config(self.config), model_directory=self.directory, program=self.program)

    @property
    def first_wake_id(self) -> int:
        """A wake id above those of all earlier drivers."""
        return self.epoch << 32


class RankGroup:
    """All ranks of one role, from their placement to their end. Built for one life; a restart makes a new group.

    A driver that did not make the ranks begins with `adopt` in place of `reserve` and `start`.
    """

    def __init__(self, role: Role, plan: EnginePlan, *, number: int) -> None:
        """Describe the group's life with this `number`; nothing is started."""
        section = plan.config.prefill if role == "prefill" else plan.config.decode
        assert section.ranks is not None, "the config must be resolved"
        self.role: Role = role
        self.num_ranks = section.ranks
        self.number = number
        self.actors: list[ActorHandle[Any]] = []
        self.epoch = plan.epoch
        self._ranks_per_node = section.ranks_per_node
        self._plan = plan
        self._config = plan.config
        self._logger = get_logger(f"{role}-group")
        self._placement: Placement | None = None
        self._places: PlacementGroup | None = None
        self._processes: list[psutil.Process] = []
        self._runs: list[asyncio.Future[RankExit | None]] = []
        self._watch: StallWatch | None = None
        self._beats: asyncio.Task[None] | None = None

    async def reserve(self) -> None:
        """Take the places of the ranks, in which nothing runs yet. Raises ConfigError or ClusterError."""
        with phase(self._logger, f"place {self.num_ranks} ranks"):
            self._placement = await self._place()
            self._places = self._placement.group

    async def start(self) -> list[RankFacts]:
        """Load the ranks in their places, let them run, and return what they are; `reserve` comes first.

        Raises what stopped the start (ConfigError, CheckpointError, ClusterError, RankError); the group is then gone.
        """
        assert self._placement is not None, "called before reserve"
        seconds = self._config.scheduler.start_timeout_seconds
        try:
            try:
                return await asyncio.wait_for(self._load(self._placement), seconds)
            except TimeoutError:
                phases = await self.phases()
                raise ClusterError(
                    f"the {self.role} ranks were not ready within {seconds:g} s (scheduler.start_timeout_seconds); "
                    f"they stand at: {phases}"
                ) from None
        except BaseException:
            self.kill()
            raise

    async def adopt(self, found: FoundGroup) -> tuple[list[RankFacts], int]:
        """Take over running ranks, in which nothing is left of their last driver's work.

        Returns what they are, and an index above all that they have seen. Raises ClusterError or RankError when one
        of them does not follow; the group is then gone.
        """
        self.number = found.number
        self.actors = [found.actors[rank] for rank in range(self.num_ranks)]
        self._places = find_places(self._plan.name, self.role)
        self._processes = local_processes(found.places)
        try:
            ends = await asyncio.wait_for(self._all("adopt", self.epoch, self._plan.first_wake_id), _ADOPT_SECONDS)
        except SupersededError:
            self.release()
            raise
        except TimeoutError:
            self.kill()
            raise ClusterError(f"the {self.role} ranks did not answer within {_ADOPT_SECONDS:g} s") from None
        except BaseException:
            self.kill()
            raise
        self._watch_runs()
        self._beats = asyncio.create_task(self._beat())
        return found.facts, max(ends)

    def release(self) -> None:
        """Leave the ranks to another driver; places in which none was started are given back."""
        self._stop_beats()
        if not self.actors:
            self.kill()
        self.actors, self._processes, self._places = [], [], None

    def begin_polls(self) -> None:
        """Begin the deadlines of `failure`: from now on the ranks are polled, and hear so that the driver lives."""
        self._stop_beats()
        self._watch = StallWatch(self.num_ranks, timeout_seconds=self._config.scheduler.step_timeout_seconds)

    def seen(self, rank: int, progress: RankProgress) -> None:
        """Note that `rank` has answered; see `StallWatch`."""
        assert self._watch is not None, "called before begin_polls"
        self._watch.seen(rank, progress)

    async def failure(self) -> RankError | None:
        """Wait until a rank ends or hangs and return why; None when the ranks were stopped in order."""
        assert self._watch is not None, "called before begin_polls"
        while True:
            done, _ = await asyncio.wait(self._runs, timeout=_WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if done:
                await asyncio.wait(self._runs, timeout=_CAUSE_SECONDS)
                return self._cause()
            stalled = self._watch.stalled()
            if stalled is not None:
                rank, text = stalled
                return RankError(text, role=self.role, rank=rank)

    def kill(self) -> None:
        """End all ranks now, also those that hang."""
        self._stop_beats()
        for actor in self.actors:
            ray.kill(actor)
        kill_processes(self._processes)
        if self._places is not None:
            remove_placement_group(self._places)
            self._places = None

    async def stop(self) -> None:
        """Let all ranks end their step loop, then end them."""
        for actor in self.actors:
            actor.stop.remote(self.epoch)
        if self._runs:
            await asyncio.wait(self._runs, timeout=_STOP_SECONDS)
        self.kill()

    async def phases(self) -> dict[str, str]:
        """Return the start phase of every rank; "no answer" for one that is still being created or hangs."""
        if not self.actors:
            text = "waits for a place" if self._placement is None else "has a place"
            return {f"{self.role}-{rank}": text for rank in range(self.num_ranks)}
        answers = [_answer(actor.status.remote()) for actor in self.actors]
        results = await asyncio.gather(*(asyncio.wait_for(answer, 1.0) for answer in answers), return_exceptions=True)
        return {
            f"{self.role}-{rank}": result["phase"] if isinstance(result, dict) else "no answer"
            for rank, result in enumerate(results)
        }

    async def _place(self) -> Placement:
        return await place(
            self.role,
            num_ranks=self.num_ranks,
            ranks_per_node=self._ranks_per_node,
            ranks_per_device=self._config.ranks_per_device or 1,
            accelerator=self._config.accelerator,
            name=places_name(self._plan.name, self.role),
            timeout_seconds=self._config.scheduler.placement_timeout_seconds,
            is_detached=self._plan.is_shared,
        )

    async def _load(self, placement: Placement) -> list[RankFacts]:
        incarnation = Incarnation(number=self.number, token=secrets.token_hex(8))
        self.actors = [self._create(rank, placement, incarnation) for rank in range(self.num_ranks)]
        self._beats = asyncio.create_task(self._beat())
        with phase(self._logger, "create the actors"):
            places: list[RankPlace] = await self._all("probe")
        self._processes = local_processes(places)
        with phase(self._logger, "load the code"):
            await self._all("load_code", self._plan.program)
        address = await self._one(0, "open_store", self._plan.program) if self.num_ranks > 1 else None
        with phase(self._logger, "load the weights"):
            facts: list[RankFacts] = await self._all("setup", self._plan.source, address)
        check_equal(facts)
        for actor in self.actors:
            actor.run.remote()
        self._watch_runs()
        return facts

    def _watch_runs(self) -> None:
        self._runs = [asyncio.ensure_future(_answer(actor.watch.remote(self.epoch))) for actor in self.actors]

    def _create(self, rank: int, placement: Placement, incarnation: Incarnation) -> ActorHandle[Any]:
        plan = self._plan
        origin = RankOrigin(
            engine=plan.name,
            epoch=plan.epoch,
            incarnation=incarnation,
            orphan_timeout_seconds=self._config.scheduler.orphan_timeout_seconds if plan.is_shared else None,
        )
        remote: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(_ACTOR_CLASSES[self.role])
        handle: ActorHandle[Any] = remote.options(
            name=rank_name(plan.name, self.role, rank),
            namespace=self._config.ray.namespace,
            lifetime="detached" if plan.is_shared else None,
            max_restarts=0,
            max_task_retries=0,
            runtime_env=self._config.ray.runtime_env or None,
            **placement.actor_options(rank),
        ).remote(origin, rank, self.num_ranks, self._config.observability.log_level)
        return handle

    async def _beat(self) -> None:
        """Tell the ranks that the driver lives while it waits for some of them, or for the other role's."""
        while True:
            for actor in self.actors:
                actor.hear_driver.remote(self.epoch)
            await asyncio.sleep(_BEAT_SECONDS)

    def _stop_beats(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        """Call `method` on all ranks; the first failure ends the wait."""
        return list(await asyncio.gather(*(self._one(rank, method, *arguments) for rank in range(self.num_ranks))))

    async def _one(self, rank: int, method: str, *arguments: object) -> Any:
        try:
            return await _answer(getattr(self.actors[rank], method).remote(*arguments))
        except RayTaskError as error:
            if isinstance(error.cause, DeepInferError):
                raise error.cause from None
            raise RankError(_last_line(str(error)), role=self.role, rank=rank) from error
        except RayError as error:
            raise RankError(f"ended in {method}: {describe_death(error)}", role=self.role, rank=rank) from error

    def _cause(self) -> RankError | None:
        """Return the best explanation among the ranks that have ended; None when all ended in order.

        Raises SupersededError when they have not ended, but obey another driver.
        """
        causes: list[RankError] = []
        complaints: list[RankError] = []
        for rank, run in enumerate(self._runs):
            if not run.done():
                continue
            error = run.exception()
            if isinstance(error, RayTaskError) and isinstance(error.cause, SupersededError):
                raise error.cause
            if error is not None:
                causes.append(RankError(describe_death(error), role=self.role, rank=rank))
                continue
            end = run.result()
            if end is not None:
                self._logger.error("rank %d broke:\n%s", rank, end.trace)
                known = complaints if end.blames_peer else causes
                known.append(RankError(end.cause, role=self.role, rank=rank))
        return next(iter(causes + complaints), None)


def check_equal(facts: Sequence[RankFacts]) -> None:
    """Raise ClusterError unless all ranks have the same model, cache layout and package version."""
    for field in ("model_digest", "layout_digest", "version"):
        values = {getattr(fact.ready, field): fact.ready for fact in facts}
        if len(values) > 1:
            shown = ", ".join(f"{ready.role} rank {ready.rank} on {ready.node}: {key}" for key, ready in values.items())
            raise ClusterError(f"the ranks differ in their {field}: {shown}; install the same files on all nodes")


def describe_death(error: BaseException) -> str:
    """Return in one line why Ray says that an actor has ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    details = [line for line in lines if "exit detail" in line or "killed" in line.lower()]
    kind = "its process has died" if isinstance(error, RayActorError) else type(error).__name__
    return f"{kind} ({(details or lines or [type(error).__name__])[-1]})"


async def _answer(reference: Any) -> Any:
    return await reference


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
