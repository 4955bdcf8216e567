"""Profiles of the ranks of a running engine, asked for by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from deepinfer.config import ClusterConfig
from deepinfer.errors import ClusterError, ConfigError, DeepInferError
from deepinfer.launcher.engine import find_driver
from deepinfer.protocol import StepProfile

_ANSWER_SECONDS = 30.0
# What a rank may take beyond the wait: to end the step it is in, and to write the trace.
_WRITE_SECONDS = 180.0


def profile_ranks(
    config: ClusterConfig, *, which: str, num_steps: int, wait_seconds: float
) -> dict[str, StepProfile | None]:
    """Profile the next `num_steps` steps of the ranks that `which` means, at the same time; by their names.

    `which`: "prefill-0", or a bare rank number (of both roles). None for a rank that ran no step within
    `wait_seconds`. This process must be connected to the engine's Ray. Raises ConfigError for a name that is none,
    ClusterError when there is no engine or a rank does not answer.
    """
    names = choose_ranks(_rank_names(config), which)
    calls = {name: _rank(config, name).profile.remote(num_steps, wait_seconds) for name in names}
    return {name: _answer(name, call, wait_seconds + _WRITE_SECONDS) for name, call in calls.items()}


def choose_ranks(names: Iterable[str], which: str) -> list[str]:
    """Return those of `names` that `which` means; ConfigError with all of them when it means none."""
    known = list(names)
    chosen = [name for name in known if name == which or name.partition("-")[2] == which]
    if not chosen:
        raise ConfigError(f"{which!r} is no rank of this engine; its ranks are {', '.join(known)}", path="--rank")
    return chosen


def _rank_names(config: ClusterConfig) -> list[str]:
    driver = find_driver(config.name, namespace=config.ray.namespace)
    if driver is None:
        raise ClusterError(f"the engine {config.name} is not up; bring it up with deepinfer-cluster up")
    try:
        status: dict[str, Any] = ray.get(driver.status.remote(), timeout=_ANSWER_SECONDS)
    except RayError as error:
        raise ClusterError(f"the driver of {config.name} does not answer: {str(error).splitlines()[0]}") from error
    if status["state"] not in ("ready", "draining"):
        raise ClusterError(f"the engine {config.name} is {status['state']}; it can be profiled once it is ready")
    return list(status["ranks"])


def _rank(config: ClusterConfig, name: str) -> Any:
    try:
        return ray.get_actor(f"{config.name}-{name}", namespace=config.ray.namespace)
    except ValueError as error:
        raise ClusterError(f"{name} is not there now; it may be starting again, so try in a minute") from error


def _answer(name: str, call: Any, seconds: float) -> StepProfile | None:
    try:
        profile: StepProfile | None = ray.get(call, timeout=seconds)
    except GetTimeoutError:
        raise ClusterError(f"{name} has not answered for {seconds:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, DeepInferError):
            raise ClusterError(f"{name}: {error.cause}") from None
        raise ClusterError(f"{name}: {str(error).strip().splitlines()[-1]}") from error
    except RayError as error:
        raise ClusterError(f"{name} ended while it was profiled: {str(error).splitlines()[0]}") from error
    return profile
