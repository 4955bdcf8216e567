"""DeepEP's dispatcher over a stand-in for the package: what is sent, how it is seen, and when it is chosen."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support import fake_deep_ep
from support.exchanges import answers_of, arrivals, combined, exchange_of, returns_bytes
from support.processes import run_ranks

from deepinfer.distributed import deep_ep_dispatcher, dispatchers
from deepinfer.distributed.deep_ep_dispatcher import DeepEpDispatcher, DeepEpLink, make_dispatcher, open_deep_ep
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.token_dispatcher import ExchangeShape, TokenDispatcher
from deepinfer.distributed.torch_dispatcher import TorchDispatcher
from deepinfer.errors import RankError
from deepinfer.kernels.ops import ExpertRows

WIDTH, COLUMNS, EXPERTS, MAX_ROWS = 256, 3, 8, 12
SHAPES = (
    ExchangeShape(COLUMNS, WIDTH * 2, WIDTH * 2, MAX_ROWS),
    ExchangeShape(1, 8, 20, 2 * MAX_ROWS),  # numbers of table rows, whose answers are bytes
)
CPU = torch.device("cpu")
_HOSTS = "TorchDispatcher"


def _open(groups: ProcessGroups, package: Any = None) -> DeepEpLink | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep_ep_dispatcher, "_connect", lambda groups, device: None)  # NCCL, which needs GPUs
        return open_deep_ep(package or fake_deep_ep.package(), groups, SHAPES, device=CPU, timeout_seconds=20.0)


def _dispatcher(groups: ProcessGroups) -> DeepEpDispatcher:
    link = _open(groups)
    assert link is not None
    return DeepEpDispatcher(link, EXPERTS, TorchDispatcher(groups.dispatch, EXPERTS))


def _pass_through(dispatcher: TokenDispatcher, seed: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    sent = exchange_of(seed, num_rows, width=WIDTH, columns=COLUMNS, num_experts=EXPERTS)
    arrived = dispatcher.dispatch(sent.rows, sent.expert_ids, sent.weights)
    first = dispatcher.rank * EXPERTS // dispatcher.num_ranks
    return arrivals(arrived), combined(dispatcher.combine(answers_of(arrived, first), arrived))


def _compare(groups: ProcessGroups, _: None) -> list[str]:
    own, oracle = _dispatcher(groups), TorchDispatcher(groups.dispatch, EXPERTS)
    rank, faults = own.rank, []
    for case, counts in enumerate([(12, 12), (0, 7), (7, 0), (0, 0), (1, 12)]):
        got, wanted = (_pass_through(dispatcher, 2 * case + rank, counts[rank]) for dispatcher in (own, oracle))
        faults += [f"{case} {what}" for what, a, b in zip("ab", got, wanted, strict=True) if not torch.equal(a, b)]
    if own._link.buffer.sizes != [MAX_ROWS * COLUMNS] * 5:
        faults.append(f"room for {own._link.buffer.sizes}")
    if own._link.buffer.num_bytes < 2 * MAX_ROWS * COLUMNS * WIDTH * 2:
        faults.append(f"{own._link.buffer.num_bytes} bytes")
    # narrower rows than the largest: FP8 with their scales; narrower answers too
    for width in (WIDTH, 130):
        given = {"width": WIDTH + 16, "answer_width": width, "columns": COLUMNS, "num_experts": EXPERTS}
        if not returns_bytes(own, 9 + rank, **given):
            faults.append(f"bytes {width}")
    return faults


def test_answers_come_home_one_by_one_from_arrivals_in_order() -> None:
    assert run_ranks(_compare, 2, None) == [[], []]


def _look_up(groups: ProcessGroups, _: None) -> list[int]:
    """Answers of 20 bytes and of float32, which DeepEP can't add."""
    dispatcher = _dispatcher(groups)
    numbers = torch.arange(5).unsqueeze(1) + 100 * dispatcher.rank
    targets = torch.tensor([[0], [7], [3], [4], [7]])
    asked = dispatcher.dispatch(numbers, targets, torch.ones(5, 1))
    answers = asked.rows.int().repeat(1, 5).view(torch.uint8)
    places = torch.arange(len(answers)).view_as(asked.expert_ids)
    back = dispatcher.combine(ExpertRows(answers, places), asked)
    arrived = dispatcher.dispatch(torch.ones(4, WIDTH), torch.tensor([[0, 5, 7]] * 4), torch.ones(4, COLUMNS))
    dispatcher.combine(answers_of(arrived, 0), arrived)
    assert dispatcher._link.buffer.sizes == [], "float32 can't be carried either"
    return back.values[back.places.flatten()].view(torch.int32)[:, 4].tolist()


def test_what_it_cannot_carry_goes_another_way() -> None:
    assert run_ranks(_look_up, 2, None) == [[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]]


def _choose(groups: ProcessGroups, argument: tuple[list[int], bool]) -> list[str]:
    ranks_with_it, have_own_gpus = argument
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatchers, "_look_around", lambda groups, device: (False, have_own_gpus))
        patch.setattr(deep_ep_dispatcher, "_connect", lambda groups, device: None)
        patch.setitem(sys.modules, "deep_ep", fake_deep_ep.package() if groups.dispatch.rank in ranks_with_it else None)
        opened = dispatchers.open_dispatchers(groups, SHAPES, device=torch.device("cuda"), timeout_seconds=5.0)
        return [type(opened(num_experts)).__name__ for num_experts in (EXPERTS, EXPERTS + 1, 254, 256)]


@pytest.mark.parametrize(
    ("ranks_with_it", "have_own_gpus", "even"),
    [
        ([0, 1], True, "DeepEpDispatcher"),
        ([0, 1], False, _HOSTS),
        ([0], True, _HOSTS),
        ([], True, _HOSTS),
    ],
)
def test_it_is_chosen_where_every_rank_has_it_and_can_serve_the_experts(
    ranks_with_it: list[int], have_own_gpus: bool, even: str
) -> None:
    assert run_ranks(_choose, 2, (ranks_with_it, have_own_gpus)) == [[even, _HOSTS, even, _HOSTS]] * 2


class _Broken(fake_deep_ep.ElasticBuffer):
    def __init__(self, group: Any, **kwargs: Any) -> None:
        super().__init__(group, **kwargs)
        if group.rank() == 1:
            raise RuntimeError("no network that it knows")

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CPU wait")


class _OldPackage:
    """The first generation has another class."""


def _fail(groups: ProcessGroups, _: None) -> list[Any]:
    broken = fake_deep_ep.package()
    broken.ElasticBuffer = _Broken
    opened = [_open(groups, package) is None for package in (broken, _OldPackage())]
    link = _open(groups)
    assert link is not None
    link.buffer.dispatch = lambda *args, **kwargs: _Broken.dispatch(link.buffer)
    dispatcher = make_dispatcher(link, lambda num_experts: TorchDispatcher(groups.dispatch, num_experts), EXPERTS)
    with pytest.raises(RankError, match=r"dispatch of 2 ranks failed; a rank is gone or hangs \(CPU wait\)"):
        _pass_through(dispatcher, 0, 3)
    return opened


def test_a_link_that_fails_on_one_rank_is_none_and_a_lost_rank_is_named() -> None:
    assert run_ranks(_fail, 2, None) == [[True, True], [True, True]]
