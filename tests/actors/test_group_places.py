"""What becomes of a group's places before any of its ranks runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cluster import FAKE_PROGRAM, small_config

from deepinfer.actors import supervisor
from deepinfer.actors.supervisor import EnginePlan, RankGroup


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The places that were given back; those of a group are "places"."""

    async def place(*_: object, **__: object) -> Any:
        return SimpleNamespace(group="places")

    given_back: list[Any] = []
    monkeypatch.setattr(supervisor, "place", place)
    monkeypatch.setattr(supervisor, "remove_placement_group", given_back.append)
    return given_back


def make_group() -> RankGroup:
    config = small_config(decode=2)
    return RankGroup("decode", EnginePlan("e", config, "/none", FAKE_PROGRAM, epoch=1, is_shared=True), number=1)


def test_a_rank_says_whether_it_has_a_place(removed: list[Any]) -> None:
    async def run() -> list[dict[str, str]]:
        group = make_group()
        before = await group.phases()
        await group.reserve()
        return [before, await group.phases()]

    assert asyncio.run(run()) == [
        {"decode-0": "waits for a place", "decode-1": "waits for a place"},
        {"decode-0": "has a place", "decode-1": "has a place"},
    ]
    assert removed == []


@pytest.mark.parametrize("end", ["kill", "release"])
def test_places_in_which_nothing_was_started_are_given_back(end: str, removed: list[Any]) -> None:
    """Also by a driver that leaves the engine to another one: that one takes places of its own."""
    group = make_group()
    asyncio.run(group.reserve())
    getattr(group, end)()
    assert removed == ["places"]


def test_ranks_that_are_left_to_another_driver_keep_their_places(removed: list[Any]) -> None:
    group = make_group()
    asyncio.run(group.reserve())
    group.actors = [SimpleNamespace()]
    group.release()
    assert removed == []
