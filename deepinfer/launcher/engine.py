"""Start an engine on the Ray that this process is connected to, and say how far it is meanwhile."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from deepinfer.actors.driver import EngineFacts, create_driver
from deepinfer.actors.rank_actor import RankProgram
from deepinfer.actors.supervisor import describe_death
from deepinfer.config import ClusterConfig, encode_config
from deepinfer.errors import ClusterError, DeepInferError
from deepinfer.log import get_logger

_LOGGER = get_logger("start")
_ASK_SECONDS = 1.0
# A start that says nothing can't be told from one that hangs.
_SILENCE_SECONDS = 20.0
_STOP_SECONDS = 30.0


def start_engine(
    config: ClusterConfig, *, name: str, model_directory: str, program: RankProgram, detached: bool = False
) -> tuple[ActorHandle[Any], EngineFacts]:
    """Start the engine `name` and return its driver and what it is. `config` is resolved.

    Every change of a rank's phase becomes a log line. Raises what stopped the start, with nothing left behind.
    """
    for note in _notes(config):
        _LOGGER.info("%s", note)
    driver = create_driver(config, name=name, detached=detached)
    try:
        start = driver.start.remote(encode_config(config), model_directory, program)
        _report_until_done(driver, start)
        facts: EngineFacts = ray.get(start)
    except RayError as error:
        ray.kill(driver)
        cause = getattr(error, "cause", None)
        if isinstance(cause, DeepInferError):
            raise cause from None
        raise ClusterError(f"the driver has failed: {describe_death(error)}") from error
    except BaseException:
        ray.kill(driver)
        raise
    return driver, facts


def find_driver(name: str, *, namespace: str) -> ActorHandle[Any] | None:
    """Return the driver of the engine `name`, in whatever state; None when there is none on this Ray."""
    try:
        driver: ActorHandle[Any] = ray.get_actor(f"{name}-driver", namespace=namespace)
    except ValueError:
        return None
    return driver


def stop_engine(driver: ActorHandle[Any]) -> None:
    """Stop all ranks in order, then the driver; an engine that has failed already is only cleared away."""
    try:
        ray.get(driver.stop.remote(), timeout=_STOP_SECONDS)
    except RayError:
        _LOGGER.warning("the engine did not stop in order; its processes are killed")
    ray.kill(driver)


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
        changed = {rank: text for rank, text in ranks.items() if shown.get(rank) != text}
        if changed or now - last_line > _SILENCE_SECONDS:
            lines = changed or ranks or {"driver": "starting"}
            _LOGGER.info("%.0f s: %s", now - begin, ", ".join(f"{rank}: {text}" for rank, text in lines.items()))
            shown, last_line = ranks, now


def _phases(driver: ActorHandle[Any]) -> dict[str, str]:
    try:
        ranks: dict[str, str] = ray.get(driver.status.remote(), timeout=_ASK_SECONDS).get("ranks", {})
    except GetTimeoutError:
        return {}
    except RayError:
        return {}  # the start's own answer says what it was
    return ranks
