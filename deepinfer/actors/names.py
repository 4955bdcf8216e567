"""The names under which an engine's actors and reserved places stand in Ray, and how they are found again."""

from __future__ import annotations

import re
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, get_placement_group

from deepinfer.protocol import Role


def driver_name(engine: str) -> str:
    """Return the name of the engine's driver."""
    return f"{engine}-driver"


def rank_name(engine: str, role: Role, rank: int) -> str:
    """Return the name of a rank's actor."""
    return f"{engine}-{role}-{rank}"


def places_name(engine: str, role: Role) -> str:
    """Return the name of a role's placement group."""
    return f"{engine}-{role}"


def find_actor(name: str, *, namespace: str) -> ActorHandle[Any] | None:
    """Return the living actor `name`, None when there is none; this process must be connected to Ray."""
    try:
        actor: ActorHandle[Any] = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return actor


def find_rank_actors(engine: str, role: Role, *, namespace: str) -> dict[int, ActorHandle[Any]]:
    """Return the living ranks of a role by rank, however many there are."""
    pattern = re.compile(rf"{re.escape(engine)}-{role}-(\d+)")
    named = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace]
    ranks = sorted(int(match[1]) for name in named if (match := pattern.fullmatch(name)))
    found = {rank: find_actor(rank_name(engine, role, rank), namespace=namespace) for rank in ranks}
    return {rank: actor for rank, actor in found.items() if actor is not None}


def find_places(engine: str, role: Role) -> PlacementGroup | None:
    """Return the role's placement group in the namespace of this process, None when there is none."""
    try:
        return get_placement_group(places_name(engine, role))
    except ValueError:
        return None
