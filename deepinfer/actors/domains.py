"""Scale-up domains: the nodes whose accelerators share one fast switch, an NVL72 rack or a single node of eight.

Ranks of a role exchange rows in every layer, so a role stays inside one domain when one can hold it. A domain is the
nodes with one value of Ray's label `ray.io/gpu-domain`; a node without the label is a domain of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

DOMAIN_LABEL = "ray.io/gpu-domain"
_NODE_LABEL = "ray.io/node-id"  # Ray puts it on every node


@dataclass(slots=True, frozen=True)
class Domain:
    """The nodes that have the value `name` of `label`; `free` and `total` are amounts of a resource, node by node."""

    name: str
    label: str
    free: tuple[float, ...]
    total: tuple[float, ...]

    @property
    def selector(self) -> dict[str, str]:
        """The labels by which Ray finds the domain's nodes."""
        return {self.label: self.name}

    def __str__(self) -> str:
        """Say how many nodes and how much of the resource there is: "rack-1: 18 nodes, 70 of 72 free"."""
        num_nodes = f"{len(self.total)} node{'' if len(self.total) == 1 else 's'}"
        name = self.name if self.label == DOMAIN_LABEL else f"node {self.name[:8]}, alone"
        return f"{name}: {num_nodes}, {sum(self.free):g} of {sum(self.total):g} free"


def group_domains(
    labels: Mapping[str, Mapping[str, str]], free: Mapping[str, float], total: Mapping[str, float]
) -> list[Domain]:
    """Return the domains of the nodes in `labels` (by node id) that have the resource at all, by label and name."""
    members: dict[tuple[str, str], list[str]] = {}
    for node, known in labels.items():
        if total.get(node):
            key = (DOMAIN_LABEL, known[DOMAIN_LABEL]) if DOMAIN_LABEL in known else (_NODE_LABEL, node)
            members.setdefault(key, []).append(node)
    return [
        Domain(name, label, tuple(free.get(node, 0.0) for node in nodes), tuple(total[node] for node in nodes))
        for (label, name), nodes in sorted(members.items())
    ]


def choose_domains(domains: Iterable[Domain], amounts: Sequence[float], *, one_per_node: bool) -> list[Domain] | None:
    """Return the domain of each bundle of `amounts`, which do not grow along the sequence; None when they don't fit.

    The smallest domain that holds all (by what is free, then by label and name) gets all. Where none does, the one that
    holds most is filled, and the rest is placed in the same way in the others. `one_per_node`: bundles never share a
    node.
    """
    left = sorted(domains, key=lambda domain: (sum(domain.free), domain.label, domain.name))
    chosen: list[Domain] = []
    while len(chosen) < len(amounts):
        wanted = amounts[len(chosen) :]
        held = {domain.name: _num_held(domain.free, wanted, one_per_node=one_per_node) for domain in left}
        best = max(left, key=lambda domain: held[domain.name], default=None)
        if best is None or held[best.name] == 0:
            return None
        chosen += [best] * held[best.name]
        left.remove(best)
    return chosen


def _num_held(free: Sequence[float], amounts: Sequence[float], *, one_per_node: bool) -> int:
    """Return how many of `amounts`, from the first on, fit on nodes with `free`; each takes the fullest it fits on."""
    left = sorted(free)
    for count, amount in enumerate(amounts):
        place = next((index for index, room in enumerate(left) if room >= amount - 1e-9), None)
        if place is None:
            return count
        rest = 0.0 if one_per_node else left[place] - amount
        del left[place]
        left = sorted([*left, rest])
    return len(amounts)
