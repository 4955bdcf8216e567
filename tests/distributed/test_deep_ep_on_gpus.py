"""DeepEP between two real GPUs of one host: what the gloo dispatcher gives."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from support.exchanges import Exchange, answers_of, arrivals, combined, exchange_of, returns_bytes
from support.processes import RankPlace, run_processes

from deepinfer.distributed.deep_ep_dispatcher import make_dispatcher, open_deep_ep
from deepinfer.distributed.token_dispatcher import ExchangeShape, TokenDispatcher
from deepinfer.distributed.torch_dispatcher import TorchDispatcher

pytestmark = pytest.mark.multi_gpu

WIDTH, COLUMNS, EXPERTS, MAX_ROWS = 5120, 6, 48, 96


def _pass_through(dispatcher: TokenDispatcher, sent: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
    arrived = dispatcher.dispatch(sent.rows, sent.expert_ids, sent.weights)
    seen = arrivals(arrived)
    first = dispatcher.rank * EXPERTS // dispatcher.num_ranks
    return seen, combined(dispatcher.combine(answers_of(arrived, first), arrived)).cpu()


def _worker(place: RankPlace, _: None) -> list[str]:
    groups, rank = place.form_groups("decode"), place.rank
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    shape = ExchangeShape(COLUMNS, WIDTH * 2, WIDTH * 2, MAX_ROWS)
    package = importlib.import_module("deep_ep")
    link = open_deep_ep(package, groups, [shape], device=device, timeout_seconds=30.0)
    if link is None:
        return ["no link"]
    oracle = TorchDispatcher(groups.dispatch, EXPERTS)
    own = make_dispatcher(link, lambda _: oracle, EXPERTS)
    faults = [] if type(own).__name__ == "DeepEpDispatcher" else [f"a {type(own).__name__} was made"]
    cases = [((96, 96), None), ((0, 40), None), ((40, 0), None), ((0, 0), None), ((90, 7), 0), ((96, 96), EXPERTS - 1)]
    for case, (counts, favourite) in enumerate(cases):
        sent = exchange_of(
            10 * case + rank, counts[rank], width=WIDTH, columns=COLUMNS, num_experts=EXPERTS, favourite=favourite
        )
        got, wanted = _pass_through(own, sent.to(device)), _pass_through(oracle, sent)
        faults += [
            f"case {case} {what}"
            for what, a, b in zip(("there", "back"), got, wanted, strict=True)
            if not torch.equal(a, b)
        ]
    for num_rows in (96, 40 * rank):
        given = {"width": 5248, "answer_width": WIDTH, "columns": COLUMNS, "num_experts": EXPERTS}
        if not returns_bytes(own, num_rows, device=str(device), **given):
            faults.append(f"bytes of {num_rows} rows")
    groups.dispatch.all_gather(torch.zeros(1))  # nobody's memory goes while another reads it
    return faults


@pytest.fixture(autouse=True)
def _needs(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip("needs DeepEP")
    monkeypatch.setenv("EP_DISABLE_GIN", "1")  # one host may have no network that DeepEP knows


@pytest.mark.parametrize("one_gpu_each", [False, True], ids=["both GPUs seen", "one GPU seen, as by a rank"])
def test_its_rows_are_those_of_the_gloo_dispatcher(one_gpu_each: bool) -> None:
    results = run_processes(_worker, 2, None, start_method="spawn", timeout_seconds=110.0, one_gpu_each=one_gpu_each)
    assert results == [[], []]
