"""Whether all ranks together can have places: what is asked for, what there is, and the cure."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import ray

from deepinfer.actors.place_need import check_places, describe_lack
from deepinfer.actors.rank_life import RankProgram
from deepinfer.config import ClusterConfig, load_config, resolve
from deepinfer.errors import ConfigError
from deepinfer.launcher import shared
from deepinfer.launcher.record import ClusterRecord


def make_config(*settings: str, accelerator: str = "nvidia") -> ClusterConfig:
    return resolve(load_config(settings=settings, environ={}).config, accelerator=accelerator)


def test_two_roles_on_one_gpu_are_told_how_to_share_it() -> None:
    """Each of them would fit alone."""
    config = make_config("prefill.ranks=1", "decode.ranks=1")
    assert describe_lack(config, 1.0) == (
        "1 prefill and 1 decode ranks ask for 2 GPU, all nodes together have 1; set 2, so that as many ranks of either "
        "role share one and its memory, or use more GPUs"
    )
    assert describe_lack(config, 2.0) is None


@pytest.mark.parametrize(
    ("settings", "total", "cure"),
    [
        (["prefill.ranks=1", "decode.ranks=2", "ranks_per_device=2"], 1.0, "set 3,"),
        (["prefill.ranks=4", "decode.ranks=4", "prefill.ranks_per_node=4", "decode.ranks_per_node=4"], 4.0, "set 2,"),
        (["prefill.ranks=1", "decode.ranks=1"], 0.0, "; use fewer ranks or more GPUs"),
        (["prefill.ranks=20", "decode.ranks=20"], 2.0, "; use fewer ranks or more GPUs"),
    ],
)
def test_the_cure_is_the_smallest_that_helps(settings: list[str], total: float, cure: str) -> None:
    lack = describe_lack(make_config(*settings), total)
    assert lack is not None
    assert cure in lack


@pytest.mark.parametrize("sharing", range(2, 17))
def test_as_many_ranks_as_share_a_gpu_fit_on_it(sharing: int) -> None:
    config = make_config("prefill.ranks=1", f"decode.ranks={sharing - 1}", f"ranks_per_device={sharing}")
    assert describe_lack(config, 1.0) is None


def test_ranks_without_a_word_share_one_gpu() -> None:
    assert describe_lack(make_config(), 1.0) is None


def test_what_nodes_have_is_compared_with_the_ranks_of_both_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 5.0, "GPU": 1.0})
    check_places(make_config("prefill.ranks=2", "decode.ranks=3", accelerator="cpu"))
    with pytest.raises(ConfigError, match=r"decode.ranks: 2 prefill and 4 decode ranks ask for 6 CPU, .* have 5; use"):
        check_places(make_config("prefill.ranks=2", "decode.ranks=4", accelerator="cpu"))
    with pytest.raises(ConfigError, match=r"ranks_per_device: 1 prefill and 1 decode ranks ask for 2 GPU"):
        check_places(make_config("prefill.ranks=1", "decode.ranks=1"))


@pytest.mark.parametrize(("provider", "is_refused"), [("local", True), ("existing", False)])
def test_up_refuses_at_once_only_where_no_nodes_can_join(
    provider: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a driver is made."""
    started: list[str] = []

    def start_engine(*_: object, name: str, **__: object) -> tuple[None, None]:
        started.append(name)
        return None, None

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.0})
    monkeypatch.setattr(shared, "find_driver", lambda *_, **__: None)
    monkeypatch.setattr(shared, "find_orphans", lambda _: None)
    monkeypatch.setattr(shared, "start_engine", start_engine)
    record = ClusterRecord(name="one", provider=provider, address="127.0.0.1:1")
    config = make_config("name=one", "prefill.ranks=1", "decode.ranks=1")
    with pytest.raises(ConfigError, match="ask for 2 GPU") if is_refused else nullcontext():
        shared._try_join_or_start(config, record, "/none", "", RankProgram())
    assert started == ([] if is_refused else ["one"])
