"""Which hosts stand in which scale-up domain: what `ray.domains` may say of it, and what `status` shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer.actors.domains import DOMAIN_LABEL
from deepinfer.config import RayConfig
from deepinfer.errors import ConfigError

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # as Kubernetes has them, and so Ray


def check_domains(config: RayConfig) -> None:
    """Raise ConfigError unless every host is of one domain only and, where there are any, one of `ray.hosts`."""
    seen: dict[str, str] = {}
    for name, hosts in config.domains.items():
        if not _LABEL_VALUE.fullmatch(name):
            raise ConfigError(f"{name!r} is no label: use letters, digits, '-', '_' and '.'", path="ray.domains")
        for host in hosts:
            if config.hosts and host not in config.hosts:
                raise ConfigError(f"{host!r} of domain {name!r} is none of ray.hosts", path="ray.domains")
            if host in seen:
                raise ConfigError(f"{host!r} stands in {seen[host]!r} and in {name!r}", path="ray.domains")
            seen[host] = name


def with_domains(ranks: Mapping[str, dict[str, Any]], nodes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return `ranks` of a status, each with the scale-up `domain` of its node if that has one.

    `nodes`: what Ray knows of its nodes. A rank names its node by the host's name.
    """
    names = {
        node["NodeManagerHostname"]: node["Labels"][DOMAIN_LABEL]
        for node in nodes
        if node["Alive"] and DOMAIN_LABEL in node["Labels"]
    }
    return {
        name: {**rank, "domain": names[rank["node"]]} if rank["node"] in names else rank for name, rank in ranks.items()
    }
