"""The log lines of an engine's processes, wherever they run, through Ray's state API (which needs the dashboard)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import ray
from ray.util.state import get_log, list_actors
from ray.util.state.exception import RayStateApiException

from deepinfer.config import ClusterConfig
from deepinfer.errors import ClusterError, ConfigError

_MAX_ACTORS = 10_000
_ORDER = {"driver": 0, "prefill": 1, "decode": 2}


def read_logs(config: ClusterConfig, *, which: str | None, num_lines: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the last `num_lines` lines (-1: all) of every process that `which` means.

    `which`: "driver", "prefill-0", a bare rank number (of both roles), or None for all. Of a rank that was restarted
    the living process is read. This process must be connected to the engine's Ray.
    """
    address = ray.get_runtime_context().gcs_address  # else Ray looks for one, and there may be several
    try:
        actors = list_actors(address=address, filters=[("ray_namespace", "=", config.ray.namespace)], limit=_MAX_ACTORS)
        chosen = _choose({actor.name: actor.actor_id for actor in sorted(actors, key=_is_alive)}, config.name, which)
        for name, actor_id in chosen:
            yield name, "".join(get_log(address=address, actor_id=actor_id, suffix="err", tail=num_lines))
    except RayStateApiException as error:
        raise ClusterError(f"Ray's dashboard does not give the logs: {error}") from error


def _is_alive(actor: object) -> bool:
    return getattr(actor, "state", None) == "ALIVE"


def _choose(ids: dict[str, str], engine: str, which: str | None) -> list[tuple[str, str]]:
    pattern = re.compile(re.escape(engine) + r"-(driver|(?:prefill|decode)-\d+)")
    names = {match[1]: actor_id for name, actor_id in ids.items() if (match := pattern.fullmatch(name or ""))}
    chosen = [name for name in names if which is None or name == which or name.partition("-")[2] == which]
    if not chosen:
        raise ConfigError(f"{which!r} is none of {', '.join(sorted(names, key=_place))}", path="--rank")
    return [(name, names[name]) for name in sorted(chosen, key=_place)]


def _place(name: str) -> tuple[int, int]:
    role, _, rank = name.partition("-")
    return _ORDER[role], int(rank or 0)
