"""Ranks that push into shared memory under Triton's interpreter: `python -m support.push_ranks NUM_RANKS`.

The interpreter has to be asked for before Triton is imported, so these ranks are processes of their own.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from support.exchanges import (
    EXPERTS,
    Exchange,
    answers_of,
    arrivals,
    combined,
    exchange_of,
    expected_arrivals,
    returns_bytes,
)

from deepinfer.distributed.peer_memory import PeerMemory
from deepinfer.distributed.push_dispatcher import PushDispatcher, PushLink
from deepinfer.distributed.push_layout import link_bytes
from deepinfer.distributed.token_dispatcher import ExchangeShape
from deepinfer.errors import RankError
from deepinfer.kernels.ops import ExpertRows

MAX_ROWS = 8
SHAPES = (ExchangeShape(3, 12 * 2, 12 * 2, MAX_ROWS), ExchangeShape(1, 8, 20, 2 * MAX_ROWS))
ROWS = ((5, 3, 0, 8), (0, 1, 8, 0), (8, 8, 8, 8), (0, 0, 0, 0))


def _exchange(dispatcher: PushDispatcher, sent: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrived here, and what came back."""
    arrived = dispatcher.dispatch(sent.rows, sent.expert_ids, sent.weights)
    assert arrived.expected_copies == sent.expert_ids.numel()
    seen = arrivals(arrived)
    first = dispatcher.rank * EXPERTS // dispatcher.num_ranks
    return seen, combined(dispatcher.combine(answers_of(arrived, first), arrived))


def _look_up(dispatcher: PushDispatcher, num_rows: int) -> bool:
    """Numbers of 8 bytes go out, 20 bytes come back for each."""
    numbers = (torch.arange(num_rows) * 7 + dispatcher.rank).unsqueeze(1)
    arrived = dispatcher.dispatch(numbers, numbers % EXPERTS, torch.ones(num_rows, 1))
    found = (arrived.rows % 251).to(torch.uint8).expand(-1, 20)
    returned = dispatcher.combine(ExpertRows(found, torch.arange(len(found)).unsqueeze(1)), arrived)
    return torch.equal(returned.values, (numbers % 251).to(torch.uint8).expand(-1, 20))


def _link(memories: list[torch.Tensor], rank: int, timeout_seconds: float) -> PushLink:
    peers = torch.tensor([memory.data_ptr() for memory in memories])
    memory = PeerMemory(memories[rank], peers)
    return PushLink(memory, SHAPES, role="decode", rank=rank, timeout_seconds=timeout_seconds)


def _faults(rank: int, memories: list[torch.Tensor], ready: Any) -> list[str]:
    link = _link(memories, rank, 1.0)
    dispatcher = PushDispatcher(link, EXPERTS)
    ready.wait()  # nobody pushes before everybody has cleared
    faults = []
    for step, counts in enumerate(ROWS):
        num_rows = counts[(rank + step) % len(counts)]
        if rank == 0:
            with link.rehearsal():  # nobody else hears of it
                seen, _ = _exchange(dispatcher, exchange_of(7, MAX_ROWS))
            if len(seen):
                faults.append(f"rank {rank} step {step}: a rehearsal sees rows of the exchange before")
        sent = [exchange_of(100 * step + r, counts[(r + step) % len(counts)]) for r in range(len(memories))]
        seen, returned = _exchange(dispatcher, sent[rank])
        if not torch.equal(seen, expected_arrivals(sent, rank)):
            faults.append(f"rank {rank} step {step}: others arrived")
        if not torch.equal(returned, sent[rank].expected()):
            faults.append(f"rank {rank} step {step}: others came back")
        if not _look_up(dispatcher, 2 * num_rows):
            faults.append(f"rank {rank} look-up {step}")
        if not returns_bytes(dispatcher, num_rows, width=16, answer_width=12, columns=3, num_experts=EXPERTS):
            faults.append(f"rank {rank} short rows {step}")
        link.check()
    return faults


def _run(rank: int, memories: list[torch.Tensor], ready: Any, out: Any) -> None:
    torch.set_num_threads(1)
    out.put(_faults(rank, memories, ready))


def _memories(num_ranks: int) -> list[torch.Tensor]:
    num_bytes = link_bytes(SHAPES, num_ranks)
    return [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(num_ranks)]


def exchange_together(num_ranks: int) -> list[str]:
    """Return what went wrong among ranks that push to each other."""
    context = multiprocessing.get_context("fork")
    ready, out = context.Barrier(num_ranks), context.SimpleQueue()
    memories = _memories(num_ranks)
    ranks = [context.Process(target=_run, args=(rank, memories, ready, out), daemon=True) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [fault for process in ranks for fault in (out.get() if process.exitcode == 0 else ["a rank died"])]


def wait_for_nobody() -> str:
    """Return what is raised for an exchange whose other rank never comes."""
    memories = _memories(2)
    link = _link(memories, 0, 1e-5)
    dispatcher = PushDispatcher(link, EXPERTS)
    link.check()
    _exchange(dispatcher, exchange_of(0, 3))
    try:
        link.check()
    except RankError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    print(wait_for_nobody())
    print("faults:", exchange_together(int(sys.argv[1])))
