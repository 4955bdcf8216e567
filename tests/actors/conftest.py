"""One private Ray for all tests of this folder, and engines of fake ranks on it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

from deepinfer.actors.driver import EngineFacts, create_driver
from deepinfer.actors.rank_actor import RankProgram
from deepinfer.client import EngineClient
from deepinfer.config import ClusterConfig, encode_config, load_config, resolve
from deepinfer.launcher import open_ray

FAKE_PROGRAM = RankProgram(build="support.fake_engine:build", open_store="support.fake_engine:open_store")
TESTS = Path(__file__).parent.parent


def small_config(*, prefill: int = 1, decode: int = 1, **scheduler: Any) -> ClusterConfig:
    """A resolved CPU config of few ranks with a small object store; `scheduler` overrides that section."""
    settings = [
        f"prefill.ranks={prefill}",
        f"decode.ranks={decode}",
        "ray.object_store_bytes=157286400",
        "observability.metrics_interval_seconds=0.5",
        *(f"scheduler.{name}={value}" for name, value in scheduler.items()),
    ]
    return resolve(load_config(settings=settings, environ={}).config, accelerator="cpu")


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A private Ray with ten places for ranks; its workers find the fake engine."""
    variables = {
        "PYTHONPATH": str(TESTS),
        "TEST_MARKERS": str(tmp_path_factory.mktemp("markers")),
        "TEST_FROM_DRIVER": "seen",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    connection = open_ray(small_config(prefill=2, decode=8))
    try:
        yield
    finally:
        connection.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Engine:
    """A running engine of fake ranks."""

    def __init__(self, driver: Any, facts: EngineFacts) -> None:
        self.driver = driver
        self.facts = facts
        self.client = EngineClient(driver, facts)

    def rank(self, role: str, rank: int) -> Any:
        return ray.get_actor(f"{self.facts.name}-{role}-{rank}")


@pytest.fixture
def start_engine(local_ray: None) -> Iterator[Callable[..., Engine]]:
    """Start engines that end with the test."""
    drivers = []

    def start(config: ClusterConfig, *, directory: str = "/models/fake") -> Engine:
        name = f"test-{secrets.token_hex(3)}"
        driver = create_driver(msgspec.structs.replace(config, name=name), name=name)
        drivers.append(driver)
        return Engine(driver, ray.get(driver.start.remote(encode_config(config), directory, FAKE_PROGRAM), timeout=60))

    yield start
    for driver in drivers:
        ray.get(driver.stop.remote(), timeout=30)
        ray.kill(driver)


@pytest.fixture(scope="session")
def shared_engine(local_ray: None) -> Iterator[Engine]:
    """One engine of 2 + 4 fake ranks, for tests that break nothing."""
    config = small_config(prefill=2, decode=4)
    driver = create_driver(config, name="shared")
    facts = ray.get(driver.start.remote(encode_config(config), "/models/fake", FAKE_PROGRAM), timeout=60)
    yield Engine(driver, facts)
    ray.get(driver.stop.remote(), timeout=30)
    ray.kill(driver)
