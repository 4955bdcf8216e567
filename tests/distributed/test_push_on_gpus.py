"""Pushing between two real GPUs: bit for bit what the gloo dispatcher gives, eagerly and in a graph."""

from __future__ import annotations

import pytest
import torch
from support.exchanges import Exchange, answers_of, arrivals, combined, exchange_of, returns_bytes
from support.processes import run_ranks

from deepinfer.distributed.dispatchers import open_dispatchers
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.token_dispatcher import ExchangeShape, TokenDispatcher
from deepinfer.distributed.torch_dispatcher import TorchDispatcher

pytestmark = pytest.mark.multi_gpu

WIDTH, COLUMNS, EXPERTS, MAX_ROWS = 5120, 6, 48, 96
REPEATS = 200


def _pass_through(dispatcher: TokenDispatcher, sent: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
    arrived = dispatcher.dispatch(sent.rows, sent.expert_ids, sent.weights)
    seen = arrivals(arrived)
    first = dispatcher.rank * EXPERTS // dispatcher.num_ranks
    return seen, combined(dispatcher.combine(answers_of(arrived, first), arrived)).cpu()


def _exchange(seed: int, num_rows: int, favourite: int | None = None) -> Exchange:
    return exchange_of(seed, num_rows, width=WIDTH, columns=COLUMNS, num_experts=EXPERTS, favourite=favourite)


def _worker(groups: ProcessGroups, _: None) -> list[str]:
    rank = groups.dispatch.rank
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shape = ExchangeShape(COLUMNS, WIDTH * 2, WIDTH * 2, MAX_ROWS)
    dispatchers = open_dispatchers(groups, [shape], device=device, timeout_seconds=20.0)
    push, oracle = dispatchers(EXPERTS), TorchDispatcher(groups.dispatch, EXPERTS)
    faults = [] if type(push).__name__ == "PushDispatcher" else [f"a {type(push).__name__} was chosen"]
    cases = [((96, 96), None), ((0, 40), None), ((40, 0), None), ((0, 0), None), ((90, 7), 0), ((96, 96), EXPERTS - 1)]
    for case, (counts, favourite) in enumerate(cases):
        sent = _exchange(10 * case + rank, counts[rank], favourite)
        on_device = sent.to(device)
        got, wanted = _pass_through(push, on_device), _pass_through(oracle, sent)
        faults += [
            f"case {case} {what}"
            for what, a, b in zip(("there", "back"), got, wanted, strict=True)
            if not torch.equal(a, b)
        ]
    for num_rows in (96, 40 * rank):
        given = {"width": 5248, "answer_width": WIDTH, "columns": COLUMNS, "num_experts": EXPERTS}
        if not returns_bytes(push, num_rows, device=f"cuda:{rank}", **given):
            faults.append(f"bytes of {num_rows} rows")
    faults += _replay(groups, push, dispatchers.recording, device)
    dispatchers.check()
    return faults


def _replay(groups: ProcessGroups, push: TokenDispatcher, recording, device: torch.device) -> list[str]:  # type: ignore[no-untyped-def]
    """The ranks record one after the other, then replay together with new rows each time."""
    rank = push.rank
    inputs = _exchange(0, MAX_ROWS).to(device)
    first = rank * EXPERTS // push.num_ranks

    def work() -> torch.Tensor:
        arrived = push.dispatch(inputs.rows, inputs.expert_ids, inputs.weights)
        return combined(push.combine(answers_of(arrived, first), arrived))

    def capture(run):  # type: ignore[no-untyped-def]
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()
        return lambda: (graph.replay(), result)[1]

    if rank == 1:
        replay = recording(capture)(work)
    groups.sync.all_gather(torch.zeros(1))
    if rank == 0:
        replay = recording(capture)(work)
    faults = []
    for step in range(REPEATS):
        sent = _exchange(1000 + 2 * step + rank, MAX_ROWS)
        for own, new in (
            (inputs.rows, sent.rows),
            (inputs.expert_ids, sent.expert_ids),
            (inputs.weights, sent.weights),
        ):
            own.copy_(new)
        if not torch.equal(replay(), sent.to(device).expected()):
            faults.append(f"replay {step}")
    return faults


def test_pushed_rows_are_those_of_the_gloo_dispatcher() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert run_ranks(_worker, 2, None, start_method="spawn") == [[], []]
