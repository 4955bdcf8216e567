"""What a user is told while weights load, and which ranks share a node."""

from __future__ import annotations

import pytest
from support.processes import run_ranks

from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.models.checkpoint_reads import LoadProgress, NodePlace
from deepinfer.runtime import node_place
from deepinfer.runtime.load_progress import LoadReporter, describe
from deepinfer.runtime.node_place import find_place


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (LoadProgress("loading weights", 0, 2**30, 0.0), "loading weights: 0.0 of 1.0 GiB"),
        (
            LoadProgress("loading weights", 2**30, 101 * 2**30, 10.0),
            "loading weights: 1.0 of 101.0 GiB, 107 MB/s, 0:16:40 left",
        ),
    ],
)
def test_words(progress: LoadProgress, text: str) -> None:
    assert describe(progress) == text


def test_progress_is_told_now_and_then_and_the_end_is_logged() -> None:
    told: list[str] = []
    logged: list[str] = []
    report = LoadReporter(told.append, logged.append)
    for done in range(1, 6):
        report(LoadProgress("loading weights", done, 5, float(done)))
    assert len(told) == 1
    assert logged == ["loading weights: 0.00 GiB in 5.0 s, 0 MB/s"]


def _place(groups: ProcessGroups, boot_ids: list[str]) -> NodePlace:
    class BootId:
        def read_bytes(self) -> bytes:
            return boot_ids[groups.sync.rank].encode()

    node_place._BOOT_ID = BootId()  # type: ignore[assignment]
    return find_place(groups)


def test_ranks_find_those_on_their_node() -> None:
    assert run_ranks(_place, 3, ["one", "two", "one"]) == [NodePlace(0, 2), NodePlace(0, 1), NodePlace(1, 2)]
    assert find_place(None) == NodePlace()
