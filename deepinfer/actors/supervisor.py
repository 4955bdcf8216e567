"""Starts a role's ranks as a whole, watches them, and ends them as a whole.

A group lives and dies together: its ranks meet in collectives, and not every survivor notices a death. So on the first
death or hang all ranks are killed at once, in Ray and by pid; nobody waits for a collective's time-out.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from deepinfer.actors.decode_actor import DecodeRank
from deepinfer.actors.placement import Placement, place
from deepinfer.actors.prefill_actor import PrefillRank
from deepinfer.actors.rank_actor import (
    CONCURRENCY_GROUPS,
    RankExit,
    RankFacts,
    RankPlace,
    RankProgram,
    RankProgress,
)
from deepinfer.actors.stall_watch import StallWatch
from deepinfer.config import ClusterConfig, encode_config
from deepinfer.errors import ClusterError, DeepInferError, RankError
from deepinfer.log import get_logger, phase
from deepinfer.protocol import Role

_ACTOR_CLASSES = {"prefill": PrefillRank, "decode": DecodeRank}
_WATCH_SECONDS = 0.5
_STOP_SECONDS = 10.0
# Ranks that lose a peer fail too, some sooner than Ray reports the peer: their complaints are not the cause.
_CAUSE_SECONDS = 0.5


class RankGroup:
    """All ranks of one role, from their placement to their end. Built for one life; a restart makes a new group."""

    def __init__(self, role: Role, config: ClusterConfig, *, name: str, directory: str, program: RankProgram) -> None:
        """Describe the group; `config` is resolved, `directory` holds the checkpoint."""
        section = config.prefill if role == "prefill" else config.decode
        assert section.ranks is not None, "the config must be resolved"
        self.role: Role = role
        self.num_ranks = section.ranks
        self.actors: list[ActorHandle[Any]] = []
        self._ranks_per_node = section.ranks_per_node
        self._config = config
        self._name = name
        self._directory = directory
        self._program = program
        self._logger = get_logger(f"{role}-group")
        self._placement: Placement | None = None
        self._processes: list[psutil.Process] = []
        self._runs: list[asyncio.Future[RankExit | None]] = []
        self._watch: StallWatch | None = None

    async def start(self) -> list[RankFacts]:
        """Place the ranks, load them, let them run, and return what they are.

        Raises what stopped the start (ConfigError, CheckpointError, ClusterError, RankError); the group is then gone.
        """
        try:
            with phase(self._logger, f"place {self.num_ranks} ranks"):
                self._placement = await self._place()
            seconds = self._config.scheduler.start_timeout_seconds
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

    def seen(self, rank: int, progress: RankProgress) -> None:
        """Note that `rank` has answered; see `StallWatch`."""
        assert self._watch is not None, "called before start"
        self._watch.seen(rank, progress)

    async def failure(self) -> RankError | None:
        """Wait until a rank ends or hangs and return why; None when the ranks were stopped in order."""
        assert self._watch is not None, "called before start"
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
        for actor in self.actors:
            ray.kill(actor)
        for process in self._processes:
            if process.is_running():  # same pid and same start time
                process.send_signal(signal.SIGKILL)
        if self._placement is not None:
            self._placement.remove()
            self._placement = None

    async def stop(self) -> None:
        """Let all ranks end their step loop, then end them."""
        for actor in self.actors:
            actor.stop.remote()
        if self._runs:
            await asyncio.wait(self._runs, timeout=_STOP_SECONDS)
        self.kill()

    async def phases(self) -> dict[str, str]:
        """Return the start phase of every rank; "no answer" for one that is still being created or hangs."""
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
            name=self._name,
            timeout_seconds=self._config.scheduler.placement_timeout_seconds,
        )

    async def _load(self, placement: Placement) -> list[RankFacts]:
        self.actors = [self._create(rank, placement) for rank in range(self.num_ranks)]
        with phase(self._logger, "create the actors"):
            places: list[RankPlace] = await self._all("probe")
        self._processes = _local_processes(places)
        with phase(self._logger, "load the code"):
            await self._all("load_code", self._program)
        address = await self._one(0, "open_store", self._program) if self.num_ranks > 1 else None
        with phase(self._logger, "load the weights"):
            config = encode_config(self._config)
            facts: list[RankFacts] = await self._all("setup", config, self._directory, address, self._program)
        check_equal(facts)
        self._watch = StallWatch(self.num_ranks, timeout_seconds=self._config.scheduler.step_timeout_seconds)
        self._runs = [asyncio.ensure_future(_answer(actor.run.remote())) for actor in self.actors]
        return facts

    def _create(self, rank: int, placement: Placement) -> ActorHandle[Any]:
        remote: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(_ACTOR_CLASSES[self.role])
        handle: ActorHandle[Any] = remote.options(
            name=f"{self._name}-{self.role}-{rank}",
            max_restarts=0,
            max_task_retries=0,
            runtime_env=self._config.ray.runtime_env or None,
            **placement.actor_options(rank),
        ).remote(self._name, rank, self.num_ranks, self._config.observability.log_level)
        return handle

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
        """Return the best explanation among the ranks that have ended; None when all ended in order."""
        causes: list[RankError] = []
        complaints: list[RankError] = []
        for rank, run in enumerate(self._runs):
            if not run.done():
                continue
            error = run.exception()
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


def _local_processes(places: Sequence[RankPlace]) -> list[psutil.Process]:
    """Return the ranks' processes on this node; the pids of other nodes mean nothing here."""
    here = ray.get_runtime_context().get_node_id()
    return [psutil.Process(place.pid) for place in places if place.node_id == here and place.pid != os.getpid()]
