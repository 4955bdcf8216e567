"""One private Ray for all tests of this folder, and engines of fake ranks on it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import msgspec
import pytest
import ray
from support.fake_cluster import FAKE_PROGRAM, Engine, small_config
from support.local_ray import local_ray

from deepinfer.actors.driver import create_driver
from deepinfer.config import ClusterConfig, encode_config

__all__ = ["local_ray"]


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


@pytest.fixture(scope="package")
def shared_engine(local_ray: None) -> Iterator[Engine]:
    """One engine of 2 + 4 fake ranks, for tests that break nothing."""
    config = small_config(prefill=2, decode=4)
    driver = create_driver(config, name="shared")
    facts = ray.get(driver.start.remote(encode_config(config), "/models/fake", FAKE_PROGRAM), timeout=60)
    yield Engine(driver, facts)
    ray.get(driver.stop.remote(), timeout=30)
    ray.kill(driver)
