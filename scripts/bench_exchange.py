"""Measure the exchange of rows between the GPUs of one host: `python scripts/bench_exchange.py [--ranks 2]`.

One process a GPU. For each number of rows a rank: microseconds of dispatch and combine inside a CUDA graph, the bytes
that leave a GPU and their speed, a plain copy of as many bytes to the peer, and NCCL's all-to-all of them. Rows go out
in FP8 with their scales, then in bf16; answers come back in bf16. Routing is random over 384 experts, 6 of them a row,
as in the released model. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deepinfer.distributed.peer_memory import PeerMemory
from deepinfer.distributed.process_groups import Group, ProcessGroups, open_store
from deepinfer.distributed.push_dispatcher import PushDispatcher, open_link
from deepinfer.distributed.token_dispatcher import ExchangeShape
from deepinfer.kernels.nvidia.casts import cast_rows
from deepinfer.kernels.ops import ExpertRows

_WIDTH, _COLUMNS, _EXPERTS = 5120, 6, 384
_REPEATS = 50


def _microseconds(work: Callable[[], Any], group: Group) -> float:
    """Mean time of `work` over `_REPEATS` calls in one recorded graph, the ranks starting together."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        for _ in range(_REPEATS):
            work()
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        group.all_gather(torch.zeros(1))
        begin.record()
        recorded.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / _REPEATS)
    return min(times)


class _Bench:
    """One rank's side of the measurements."""

    def __init__(self, groups: ProcessGroups, device: torch.device, max_rows: int) -> None:
        self.groups, self.device = groups, device
        row_bytes = _WIDTH * 2
        shape = ExchangeShape(_COLUMNS, row_bytes, row_bytes, max_rows)
        link = open_link(groups, [shape], device=device, timeout_seconds=20.0)
        if link is None:
            raise SystemExit("these GPUs can't write each other's memory")
        self.link, self.dispatcher = link, PushDispatcher(link, _EXPERTS)

    def measure(self, num_rows: int, *, is_cast: bool) -> str:
        """A line for exchanges of `num_rows` rows a rank."""
        generator = torch.Generator().manual_seed(self.dispatcher.rank)
        rows = torch.randn(num_rows, _WIDTH, generator=generator).bfloat16().to(self.device)
        if is_cast:
            rows = cast_rows(rows).packed
        ids = torch.rand(num_rows, _EXPERTS, generator=generator).argsort(1)[:, :_COLUMNS].contiguous().to(self.device)
        weights = torch.rand(num_rows, _COLUMNS, generator=generator).to(self.device)
        arrived = self.dispatcher.dispatch(rows, ids, weights)
        copies = arrived.expert_ids.numel()
        values = torch.randn(copies, _WIDTH, device=self.device, dtype=torch.bfloat16)
        places = torch.arange(copies, device=self.device).view_as(arrived.expert_ids)
        self.dispatcher.combine(ExpertRows(values, places), arrived)
        group, rank, num_ranks = self.groups.sync, self.dispatcher.rank, self.dispatcher.num_ranks

        def both() -> None:
            sent = self.dispatcher.dispatch(rows, ids, weights)
            self.dispatcher.combine(ExpertRows(values, places), sent)

        def out() -> None:
            self.dispatcher.dispatch(rows, ids, weights)

        # dispatches alone would overwrite what another rank still reads: for timing only
        out_us, both_us = _microseconds(out, group), _microseconds(both, group)
        self.link.check()
        owners = ids.cpu() * num_ranks // _EXPERTS
        sent = sum(int((owners == peer).any(1).sum()) for peer in range(num_ranks) if peer != rank)
        answered = int((owners != rank).sum())
        return (
            f"{num_rows} rows in {'FP8' if is_cast else 'bf16'}: "
            f"dispatch {out_us:.1f} us ({sent} rows, {sent * rows[0].nbytes / out_us / 1e3:.0f} GB/s), "
            f"combine {both_us - out_us:.1f} us ({answered} rows, "
            f"{answered * _WIDTH * 2 / (both_us - out_us) / 1e3:.0f} GB/s), both {both_us:.1f} us"
        )

    def all_to_all(self, num_rows: int) -> str:
        """NCCL with fixed sizes: as many bytes as `num_rows` cast rows to each rank, and the answers."""
        rows = cast_rows(torch.zeros(num_rows, _WIDTH, dtype=torch.bfloat16, device=self.device)).packed
        answers = torch.zeros(num_rows * _COLUMNS, _WIDTH, dtype=torch.bfloat16, device=self.device)
        times = []
        for sent in (rows.repeat(self.dispatcher.num_ranks, 1), answers):
            received = torch.empty_like(sent)
            times.append(_microseconds(partial(dist.all_to_all_single, received, sent), self.groups.sync))
        return f"{num_rows} rows: NCCL all-to-all {times[0]:.1f} us there, {times[1]:.1f} us back"


def _peer_copy(memory: PeerMemory, group: Group) -> str:
    """GB/s of plain copies into the next rank's memory, all ranks at once."""
    num_bytes = len(memory.own)
    target = memory.pieces[(group.rank + 1) % group.num_ranks]
    source = torch.zeros_like(memory.own)
    parts = []
    for size in (num_bytes // 64 // 16 * 16, num_bytes // 8 // 16 * 16, num_bytes):
        us = _microseconds(partial(target[:size].copy_, source[:size]), group)
        parts.append(f"{size / 2**20:.1f} MiB {us:.1f} us {size / us / 1e3:.0f} GB/s")
    return "peer copy: " + ", ".join(parts)


def _rank(rank: int, num_ranks: int, port: int, sizes: list[int]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = ProcessGroups.form(
        role="decode",
        rank=rank,
        num_ranks=num_ranks,
        host="127.0.0.1",
        port=port,
        meeting_seconds=60,
        timeout_seconds=60,
    )
    bench = _Bench(groups, device, max(sizes))

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(f"{type(bench.dispatcher).__name__} on {num_ranks} x {torch.cuda.get_device_name()}")
    for size in sizes:
        for is_cast in (True, False):
            say(bench.measure(size, is_cast=is_cast))
    say(_peer_copy(bench.link.memory, groups.sync))
    os.environ.update(NCCL_NVLS_ENABLE="0")
    dist.init_process_group("nccl", store=groups.store, rank=rank, world_size=num_ranks, device_id=device)
    for size in sizes:
        say(bench.all_to_all(size))
    torch.cuda.synchronize()
    groups.sync.all_gather(torch.zeros(1))
    dist.destroy_process_group()


def main() -> None:
    """Start one process a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to use")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 256], help="rows a rank")
    arguments = parser.parse_args()
    store, port = open_store("127.0.0.1")
    mp.spawn(_rank, (arguments.ranks, port, arguments.rows), nprocs=arguments.ranks)
    del store


if __name__ == "__main__":
    main()
