"""Engines that outlive the command that starts them: up, down and status, whatever the provider of their Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from deepinfer.actors.engine_facts import EngineFacts
from deepinfer.actors.place_need import check_places
from deepinfer.actors.rank_life import RankProgram
from deepinfer.actors.rank_processes import wait_until_gone
from deepinfer.config import ClusterConfig
from deepinfer.errors import ClusterError, ConfigError
from deepinfer.launcher.accelerator import resolve_for_ray, resolve_here
from deepinfer.launcher.differences import check_joinable
from deepinfer.launcher.engine import EngineExistsError, find_driver, start_engine, stop_engine
from deepinfer.launcher.host_domains import with_domains
from deepinfer.launcher.host_need import check_host
from deepinfer.launcher.local import attach_recorded, is_reachable
from deepinfer.launcher.memory import check_fits
from deepinfer.launcher.model_settings import check_model_settings
from deepinfer.launcher.orphans import end_orphans, find_orphans, take_over
from deepinfer.launcher.providers import start_ray, stop_ray
from deepinfer.launcher.record import (
    ClusterRecord,
    living,
    mark_processes,
    read_record,
    remove_record,
    write_record,
)
from deepinfer.log import get_logger

_LOGGER = get_logger("launcher")
_ANSWER_SECONDS = 30.0
_ASK_SECONDS = 1.0
# Ranks of an engine that was killed as a whole may still be ending; their memory counts as free only after that.
_LEFTOVER_SECONDS = 30.0


def bring_up(
    config: ClusterConfig, *, model_directory: str, model_digest: str, program: RankProgram
) -> tuple[ClusterRecord, EngineFacts]:
    """Bring the engine `config.name` up, or join the one that is up already.

    What `config` leaves to the machine is chosen by the one that Ray runs on. An engine whose ranks can't fit their
    devices is refused before anything is started.
    Ranks whose driver has died are taken over if they are what is asked for, and ended if not. Raises ConfigError when
    the one that is up is another one than asked for, and what stopped a start. A Ray that was started for an engine
    that did not come up is stopped again.
    """
    unresolved, config = config, resolve_here(config)
    check_model_settings(config, Path(model_directory))
    if unresolved.accelerator != "auto" or config.ray.provider == "local":
        check_fits(config, Path(model_directory))
    record = read_record(config)
    is_new = record is None or not is_reachable(record.address)
    if is_new:
        if record is not None:
            _LOGGER.warning("the Ray of the last `up` at %s is gone; clearing what it left", record.address)
            _refuse_leftovers(stop_ray(record, config.ray))
            remove_record(config)
        if config.ray.provider == "local":
            check_host(config, Path(model_directory), with_ray=True)
        record = start_ray(config)
        write_record(config, record)
    assert record is not None
    try:
        connection = attach_recorded(record, config.ray)
        try:
            config = resolve_for_ray(unresolved, connection)
            check_fits(config, Path(model_directory))
            facts = _join_or_start(config, record, model_directory, model_digest, program)
        finally:
            connection.close()
    except BaseException:
        if is_new:
            stop_ray(record, config.ray)
            remove_record(config)
        raise
    record = msgspec.structs.replace(record, processes=mark_processes((ready.node, ready.pid) for ready in facts.ranks))
    write_record(config, record)
    return record, facts


def take_down(config: ClusterConfig, *, drain_seconds: float) -> bool:
    """Drain and stop the engine `config.name`, and the Ray that `up` started for it; False when none was up.

    Raises ClusterError with what could not be stopped.
    """
    record = read_record(config)
    if record is None:
        return False
    if is_reachable(record.address):
        connection = attach_recorded(record, config.ray)
        try:
            driver = find_driver(config.name, namespace=config.ray.namespace)
            if driver is not None:
                _drain(driver, drain_seconds)
                stop_engine(driver)
            end_orphans(config)
        finally:
            connection.close()
    leftovers = stop_ray(record, config.ray)
    _refuse_leftovers(leftovers)
    remove_record(config)
    return True


def read_status(config: ClusterConfig) -> dict[str, Any]:
    """Return the driver's numbers with `address` and `dashboard`; the state is "down" when no engine is up."""
    with connected(config) as record:
        status: dict[str, Any] = {"engine": config.name, "state": "down"}
        if record is None:
            return status
        driver = find_driver(config.name, namespace=config.ray.namespace)
        if driver is not None:
            status = _ask(driver.status.remote())
            if "requests" in status:  # its ranks have started
                status["ranks"] = with_domains(status["ranks"], ray.nodes())
        elif (orphans := find_orphans(config)) is not None:
            status["state"] = "without a driver"
            status["fatal"] = (
                f"the driver has died; {orphans.num_ranks} ranks wait for a new one, which `deepinfer-cluster up` or "
                "the next job starts, and end by themselves after scheduler.orphan_timeout_seconds"
            )
        return {**status, "address": record.address, "dashboard": record.dashboard_url}


@contextmanager
def connected(config: ClusterConfig) -> Iterator[ClusterRecord | None]:
    """Connect to the Ray of the engine `config.name` while the block runs; None when that Ray is not there."""
    record = read_record(config)
    if record is None or not is_reachable(record.address):
        yield None
        return
    connection = attach_recorded(record, config.ray)
    try:
        yield record
    finally:
        connection.close()


def _join_or_start(
    config: ClusterConfig, record: ClusterRecord, model_directory: str, model_digest: str, program: RankProgram
) -> EngineFacts:
    while True:
        try:
            return _try_join_or_start(config, record, model_directory, model_digest, program)
        except EngineExistsError as error:
            _LOGGER.info("%s", error)
            time.sleep(_ASK_SECONDS)


def _try_join_or_start(
    config: ClusterConfig, record: ClusterRecord, model_directory: str, model_digest: str, program: RankProgram
) -> EngineFacts:
    driver = find_driver(config.name, namespace=config.ray.namespace)
    if driver is not None:
        state = _wait_while_starting(driver)
        if state == "ready":
            facts: EngineFacts = _ask(driver.facts.remote())
            check_joinable(config, model_digest, facts)
            _LOGGER.info("the engine %s is up already", config.name)
            return facts
        _LOGGER.warning("the engine %s has %s; it is stopped and started again", config.name, state)
        stop_engine(driver)
    adopted = _take_over(config, model_digest)
    if adopted is not None:
        return adopted
    if record.provider == "local":  # to this Ray no more nodes come
        check_places(config)
    _wait_for_predecessor(record)
    _, facts = start_engine(config, name=config.name, model_directory=model_directory, program=program, detached=True)
    return facts


def _take_over(config: ClusterConfig, model_digest: str) -> EngineFacts | None:
    """Take over ranks that have lost their driver. Ranks that can't be taken over are ended, and None is returned."""
    orphans = find_orphans(config)
    if orphans is None:
        return None
    try:
        return take_over(orphans, config, model_digest)
    except EngineExistsError:
        raise
    except (ConfigError, ClusterError) as error:
        _LOGGER.warning("the ranks of the last driver are ended and started again: %s", error)
    end_orphans(config)
    return None


def _wait_while_starting(driver: ActorHandle[Any]) -> str:
    while True:
        status = _ask(driver.status.remote())
        state: str = status["state"]
        if state not in ("created", "starting"):
            return state
        _LOGGER.info("another command is starting the engine: %s", status.get("ranks", {}))
        time.sleep(_ASK_SECONDS)


def _wait_for_predecessor(record: ClusterRecord) -> None:
    """Wait until the recorded ranks of an engine that was killed are gone, so that their memory counts as free."""
    processes = living(record.processes)
    if not processes:
        return
    _LOGGER.info("waiting for %d processes of the last engine to end", len(processes))
    alive = wait_until_gone(processes, _LEFTOVER_SECONDS)
    if alive:
        pids = ", ".join(str(process.pid) for process in alive)
        raise ClusterError(
            f"ranks of the last engine are still there after {_LEFTOVER_SECONDS:g} s (pids {pids}) and hold memory; "
            "end them, then bring the engine up again"
        )


def _drain(driver: ActorHandle[Any], seconds: float) -> None:
    try:
        num_left = ray.get(driver.drain.remote(seconds), timeout=seconds + _ANSWER_SECONDS)
    except RayError as error:
        _LOGGER.warning("the engine can't be drained: %s", str(error).splitlines()[0])
        return
    if num_left:
        _LOGGER.warning("%d sequences were still running after %g s; their rows can be run again", num_left, seconds)


def _refuse_leftovers(leftovers: list[str]) -> None:
    if leftovers:
        raise ClusterError(f"these processes could not be ended: {', '.join(leftovers)}; end them by hand")


def _ask(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=_ANSWER_SECONDS)
    except GetTimeoutError:
        raise ClusterError(f"the driver has not answered for {_ANSWER_SECONDS:g} s; take the engine down") from None
    except RayError as error:
        raise ClusterError(f"the driver has failed: {str(error).splitlines()[0]}; take the engine down") from error
