"""Start an engine on the Ray that this process is connected to, and say how far it is meanwhile."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from deepinfer.actors.adoption import ROLES, end_group, find_groups
from deepinfer.actors.driver import create_driver
from deepinfer.actors.engine_facts import EngineFacts
from deepinfer.actors.names import driver_name, find_actor, find_rank_actors
from deepinfer.actors.rank_life import RankProgram
from deepinfer.actors.supervisor import describe_death
from deepinfer.config import ClusterConfig, encode_config
from deepinfer.errors import ClusterError, DeepInferError
from deepinfer.log import get_logger

_LOGGER = get_logger("start")
_ASK_SECONDS = 1.0
# A start that says nothing can't be told from one that hangs.
_SILENCE_SECONDS = 20.0
_STOP_SECONDS = 30.0
# So many ranks in one phase are named one by one.
_MAX_NAMED = 8


class EngineExistsError(ClusterError):
    """Another process has begun to start the engine of that name at the same time."""


def start_engine(
    config: ClusterConfig, *, name: str, model_directory: str, program: RankProgram, detached: bool = False
) -> tuple[ActorHandle[Any], EngineFacts]:
    """Start the engine `name` and return its driver and what it is. `config` is resolved.

    Every change of a rank's phase becomes a log line. Raises what stopped the start, with nothing left behind but,
    after an interruption, loaded ranks that were there before.
    """
    for note in _notes(config):
        _LOGGER.info("%s", note)
    is_fresh = detached and not any(find_rank_actors(name, role, namespace=config.ray.namespace) for role in ROLES)
    try:
        driver = create_driver(config, name=name, detached=detached)
    except ValueError as error:  # Ray's way to say that the name is taken
        raise EngineExistsError(f"another command is starting the engine {name!r}: {error}") from error
    try:
        start = driver.start.remote(encode_config(config), model_directory, program)
        _report_until_done(driver, start)
        facts: EngineFacts = ray.get(start)
    except BaseException as error:
        ray.kill(driver)
        if is_fresh:
            _end_ranks(config, name)
        if not isinstance(error, RayError):
            raise
        cause = getattr(error, "cause", None)
        if isinstance(cause, DeepInferError):
            raise cause from None
        raise ClusterError(f"the driver has failed: {describe_death(error)}") from error
    return driver, facts


def find_driver(name: str, *, namespace: str) -> ActorHandle[Any] | None:
    """Return the driver of the engine `name`, in whatever state; None when there is none on this Ray."""
    return find_actor(driver_name(name), namespace=namespace)


def stop_engine(driver: ActorHandle[Any]) -> None:
    """Stop all ranks in order, then the driver; an engine that has failed already is only cleared away."""
    try:
        ray.get(driver.stop.remote(), timeout=_STOP_SECONDS)
    except RayError:
        _LOGGER.warning("the engine did not stop in order; its processes are killed")
    ray.kill(driver)


def _end_ranks(config: ClusterConfig, name: str) -> None:
    """End the ranks of a driver that could not do so itself."""
    for group in find_groups(name, namespace=config.ray.namespace).values():
        end_group(name, group, namespace=config.ray.namespace)


def _notes(config: ClusterConfig) -> list[str]:
    """What a user should know of modes that change answers."""
    notes = []
    if config.model.prefill_truncation == "compact":
        notes.append(
            "prompts are cut short as the model was trained: the decoder's layers run on their last tokens only; "
            "a request with prompt_logprobs runs them on the whole prompt, which changes its answer"
        )
    if config.determinism.batch_invariant:
        notes.append("batch-invariant: kernels and dispatchers that are not are refused; reuse of prefixes is off")
    return notes


def _report_until_done(driver: ActorHandle[Any], start: Any) -> None:
    begin = time.monotonic()
    last_line = begin
    shown: dict[str, str] = {}
    while not ray.wait([start], timeout=_ASK_SECONDS)[0]:
        ranks = _phases(driver)
        now = time.monotonic()
        changed = {rank: text for rank, text in ranks.items() if _phase(shown.get(rank, "")) != _phase(text)}
        if changed or now - last_line > _SILENCE_SECONDS:
            lines = changed or ranks or shown or {"driver": "starting"}
            _LOGGER.info("%.0f s: %s", now - begin, summarize(lines))
            shown, last_line = ranks or shown, now


def summarize(ranks: dict[str, str]) -> str:
    """Return where the ranks stand in one line; of many ranks in one phase, the first speaks for all."""
    by_phase: defaultdict[str, list[str]] = defaultdict(list)
    for rank, text in ranks.items():
        by_phase[_phase(text)].append(rank)
    parts = []
    for names in by_phase.values():
        if len(names) > _MAX_NAMED:
            parts.append(f"{len(names)} ranks like {names[0]}: {ranks[names[0]]}")
        else:
            parts += [f"{name}: {ranks[name]}" for name in names]
    return ", ".join(parts)


def _phase(text: str) -> str:
    """The name of a phase, without how far it is."""
    return text.partition(":")[0]


def _phases(driver: ActorHandle[Any]) -> dict[str, str]:
    """Return the phase of each rank; nothing of a driver that is slow to answer, or has started or failed meanwhile."""
    try:
        status: dict[str, Any] = ray.get(driver.status.remote(), timeout=_ASK_SECONDS)
    except GetTimeoutError:
        return {}
    except RayError:
        return {}  # the start's own answer says what it was
    return status["ranks"] if status["state"] == "starting" else {}
