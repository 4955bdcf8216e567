"""Ray's environment variables: set for the processes that we start, and taken back afterwards."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]


def ray_environment(token: Path) -> dict[str, str | None]:
    """Ray's variables for a Ray of our own with the token in the file `token`; its processes inherit them.

    One thread per rank process: the ranks of one machine share its cores. The memory monitor would kill ranks while
    they load weights.
    """
    return {
        **token_environment(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "OMP_NUM_THREADS": "1",
    }


def token_environment(token: Path) -> dict[str, str | None]:
    """The variables with which a process shows the token to Ray."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(token)}


def write_token(folder: Path) -> Path:
    """Write a new random token, readable by this user only, and return its file."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    return token


def set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables (None removes one) and return what stood there before.

    Ray reads its authentication mode and token when it is imported, so it is told to look again.
    """
    replaced = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    return replaced
