"""How the pods of an engine on Kubernetes are split into worker groups: one for a role, or for a role in a domain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.actors.domains import DOMAIN_LABEL, Domain, choose_domains
from deepinfer.config import ClusterConfig
from deepinfer.errors import ConfigError
from deepinfer.launcher.host_domains import check_domains
from deepinfer.protocol import Role

# Kubernetes' labels of DNS, of which names are made.
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_GPUS_PER_NODE = 8


@dataclass(slots=True, frozen=True)
class PodGroup:
    """`num_pods` equal pods of `num_ranks` ranks each, on the nodes named `nodes` of its `domain`, if it has one."""

    role: Role
    num_pods: int
    num_ranks: int
    domain: str | None = None
    nodes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The group's name."""
        return self.role if self.domain is None else f"{self.role}-{self.domain}"


def pod_groups(config: ClusterConfig) -> list[PodGroup]:
    """Return the groups of both roles. `ray.domains` may name Kubernetes' nodes of each domain; a pod fills its node.

    Raises ConfigError when ranks do not fill pods, when a domain's name can't be part of a group's name, and when the
    nodes of all domains are too few.
    """
    roles = [
        _role_pods("prefill", config.prefill.ranks or 1, config.prefill.ranks_per_node),
        _role_pods("decode", config.decode.ranks or 1, config.decode.ranks_per_node),
    ]
    return list(_in_domains(roles, config)) if config.ray.domains else roles


def _role_pods(role: Role, ranks: int, ranks_per_node: int | None) -> PodGroup:
    per_pod = min(ranks, ranks_per_node or _GPUS_PER_NODE)
    if ranks % per_pod:
        raise ConfigError(f"{ranks} ranks can't be spread evenly over pods of {per_pod}", path=f"{role}.ranks_per_node")
    return PodGroup(role, ranks // per_pod, per_pod)


def _in_domains(roles: list[PodGroup], config: ClusterConfig) -> Iterator[PodGroup]:
    check_domains(config.ray)
    for name in config.ray.domains:
        if not DNS_LABEL.fullmatch(name):
            raise ConfigError(f"{name!r} becomes part of a name: use small letters, digits, '-'", path="ray.domains")
    num_free = {name: len(nodes) for name, nodes in config.ray.domains.items()}
    for pods in sorted(roles, key=lambda pods: pods.num_pods, reverse=True):  # the larger role is harder to place
        for name, count in _choose(pods, num_free).items():
            num_free[name] -= count
            yield PodGroup(pods.role, count, pods.num_ranks, name, config.ray.domains[name])


def _choose(pods: PodGroup, num_free: dict[str, int]) -> Counter[str]:
    """How many of the pods go into which domain, by the rule with which their ranks are placed later."""
    domains = [Domain(name, DOMAIN_LABEL, (1.0,) * count, (1.0,) * count) for name, count in num_free.items()]
    chosen = choose_domains(domains, [1.0] * pods.num_pods, one_per_node=True)
    if chosen is None:
        free = ", ".join(f"{count} in {name}" for name, count in num_free.items())
        message = f"{pods.num_pods} pods of {pods.role} ranks need a node each, left are {free}; add nodes"
        raise ConfigError(message, path="ray.domains")
    return Counter(domain.name for domain in chosen)
