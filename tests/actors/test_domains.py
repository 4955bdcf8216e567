"""Which domain gets which bundle, on made-up clusters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deepinfer.actors.domains import DOMAIN_LABEL, Domain, choose_domains, group_domains


def rack(name: str, *free: float) -> Domain:
    return Domain(name, DOMAIN_LABEL, free, tuple(8.0 for _ in free))


def names(domains: Sequence[Domain], amounts: Sequence[float], *, one_per_node: bool = False) -> str | None:
    chosen = choose_domains(domains, amounts, one_per_node=one_per_node)
    return None if chosen is None else "".join(domain.name for domain in chosen)


@pytest.mark.parametrize(
    ("domains", "amounts", "expected"),
    [
        ([rack("a", 8, 8), rack("b", 4, 4)], [1] * 8, "b" * 8),  # the smaller one that holds all, not the first
        ([rack("a", 8, 8), rack("b", 4, 3)], [1] * 8, "a" * 8),
        ([rack("b", 8), rack("a", 8)], [1] * 8, "a" * 8),
        ([rack("a", 8), rack("b", 8, 4)], [1] * 16, "b" * 12 + "a" * 4),  # none holds all: one is filled first
        ([rack("a", 8), rack("b", 8, 8), rack("c", 2)], [1] * 18, "b" * 16 + "c" * 2),  # what is left goes by the rule
        ([rack("a", 8), rack("b", 8)], [1] * 17, None),
        ([], [1], None),
        ([rack("a", 1, 1), rack("b", 0.5)], [0.5], "b"),
        ([rack("a", 0.3, 0.3, 0.3, 0.3)], [0.5, 0.5], None),  # enough in sum, but a bundle stays on one node
    ],
)
def test_packed_bundles(domains: list[Domain], amounts: list[float], expected: str | None) -> None:
    assert names(domains, amounts) == expected


@pytest.mark.parametrize(
    ("domains", "amounts", "expected"),
    [
        ([rack("a", 8), rack("b", 4, 4)], [4, 4], "bb"),  # two on the one node of a are not wanted
        ([rack("a", 8), rack("b", 4)], [4, 4], "ba"),
        ([rack("a", 8, 2)], [8, 2], "aa"),  # the rest takes the node that is just large enough
        ([rack("a", 8, 8), rack("b", 8, 8)], [8, 8, 8], "aab"),
        ([rack("a", 7, 7), rack("b", 7)], [8], None),
    ],
)
def test_bundles_on_nodes_of_their_own(domains: list[Domain], amounts: list[float], expected: str | None) -> None:
    assert names(domains, amounts, one_per_node=True) == expected


def test_a_node_without_a_label_is_alone() -> None:
    """Two unlabelled nodes must not pass for one domain, and nodes without the resource do not count."""
    labels = {"n1": {DOMAIN_LABEL: "rack"}, "n2": {DOMAIN_LABEL: "rack"}, "n3": {}, "n4": {}, "head": {}}
    found = group_domains(labels, {"n1": 3.0, "n3": 4.0}, {"n1": 4.0, "n2": 4.0, "n3": 4.0, "n4": 4.0, "head": 0.0})
    assert [(domain.selector, domain.free, domain.total) for domain in found] == [
        ({DOMAIN_LABEL: "rack"}, (3.0, 0.0), (4.0, 4.0)),
        ({"ray.io/node-id": "n3"}, (4.0,), (4.0,)),
        ({"ray.io/node-id": "n4"}, (0.0,), (4.0,)),
    ]
    assert [str(domain) for domain in found] == [
        "rack: 2 nodes, 3 of 8 free",
        "node n3, alone: 1 node, 4 of 4 free",
        "node n4, alone: 1 node, 0 of 4 free",
    ]
