"""Ranks that have outlived their driver: which there are, whether a new driver can take them over, and their end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group

from deepinfer import __version__
from deepinfer.actors.names import find_places, find_rank_actors
from deepinfer.actors.rank_life import RankFacts, RankPlace, RankSource, RankState
from deepinfer.actors.rank_processes import kill_processes, local_processes, wait_until_gone
from deepinfer.errors import ClusterError
from deepinfer.protocol import Role

ROLES: tuple[Role, ...] = ("prefill", "decode")
_ANSWER_SECONDS = 10.0
_END_SECONDS = 30.0
_POLL_SECONDS = 0.1


@dataclass(slots=True, frozen=True)
class FoundGroup:
    """The living ranks of a role, by rank; `states` are of those that answered. Both are empty when there are none."""

    role: Role
    actors: dict[int, ActorHandle[Any]]
    states: dict[int, RankState]

    @property
    def epoch(self) -> int:
        """The newest epoch that a rank has seen, 0 without ranks."""
        return max((state.epoch for state in self.states.values()), default=0)

    @property
    def number(self) -> int:
        """The number of the newest life that a rank belongs to, 0 without ranks."""
        return max((state.incarnation.number for state in self.states.values()), default=0)

    @property
    def facts(self) -> list[RankFacts]:
        """What the loaded ranks are, by rank."""
        return [state.facts for _, state in sorted(self.states.items()) if state.facts is not None]

    @property
    def places(self) -> list[RankPlace]:
        """Where the ranks run."""
        return [state.place for state in self.states.values()]

    def obstacle(self, source: RankSource, num_ranks: int) -> str | None:
        """Return why a driver that wants `num_ranks` ranks, loaded with `source`, can't take these over, or None."""
        for rank in range(num_ranks):
            problem = self._problem(rank, source, num_ranks)
            if problem is not None:
                return f"{self.role}-{rank} {problem}"
        if len({state.incarnation.token for state in self.states.values()}) > 1:
            return f"the {self.role} ranks do not belong together"
        return None

    def _problem(self, rank: int, source: RankSource, num_ranks: int) -> str | None:
        if rank not in self.actors:
            return "is gone"
        state = self.states.get(rank)
        if state is None:
            return "does not answer"
        if state.source is None or state.facts is None:
            return "has not finished loading"
        if not state.is_running:
            return "has stopped"
        if state.version != __version__:
            return f"is of version {state.version}, this is {__version__}"
        if state.num_ranks != num_ranks:
            return f"is one of {state.num_ranks} ranks, wanted are {num_ranks}"
        return None if state.source == source else "was loaded with other settings"


def find_groups(engine: str, *, namespace: str) -> dict[Role, FoundGroup]:
    """Return what lives of the engine's ranks on this Ray; waits some seconds for the answers of ranks that hang."""
    groups: dict[Role, FoundGroup] = {}
    for role in ROLES:
        actors = find_rank_actors(engine, role, namespace=namespace)
        answers = {rank: actor.introduce.remote() for rank, actor in actors.items()}
        deadline = time.monotonic() + _ANSWER_SECONDS
        states = {rank: state for rank, answer in answers.items() if (state := _state(answer, deadline)) is not None}
        groups[role] = FoundGroup(role, actors, states)
    return groups


def end_group(engine: str, group: FoundGroup, *, namespace: str) -> None:
    """Kill all ranks of `group`, free their places in Ray, and wait until they are gone.

    Raises ClusterError when one of them stays.
    """
    processes = local_processes(group.places)
    for actor in group.actors.values():
        ray.kill(actor)
    kill_processes(processes)
    places = find_places(engine, group.role)
    if places is not None:
        remove_placement_group(places)
    alive = wait_until_gone(processes, _END_SECONDS)
    deadline = time.monotonic() + _END_SECONDS
    while (left := find_rank_actors(engine, group.role, namespace=namespace)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if left or alive:
        names = ", ".join([*(f"{group.role}-{rank}" for rank in left), *(f"pid {process.pid}" for process in alive)])
        raise ClusterError(f"ranks of the last engine do not end: {names}; end their processes by hand")


def _state(answer: ObjectRef, deadline: float) -> RankState | None:
    try:
        state: RankState = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
    except RayError:
        return None
    return state
