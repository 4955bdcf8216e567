"""One private Ray for all tests of a process that need one; import the fixture into a folder's conftest."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.fake_cluster import TESTS, environment, small_config

from deepinfer.launcher import open_ray

HOST_INTERFACE = "lo"


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A private Ray with ten places for ranks; its workers find the fake engine."""
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
        "TEST_MARKERS": str(tmp_path_factory.mktemp("markers")),
        "TEST_FROM_DRIVER": "seen",
        "GLOO_SOCKET_IFNAME": HOST_INTERFACE,  # a setting of the host, as an administrator of a node makes it
    }
    with environment(variables):
        connection = open_ray(small_config(prefill=2, decode=8))
        yield
        connection.close()
