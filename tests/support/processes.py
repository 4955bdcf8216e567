"""Run a function on several real ranks: processes that have formed their process groups.

They are forked from a server that has imported torch once and started no threads: importing it takes seconds.
"""

from __future__ import annotations

import multiprocessing
import pickle
import queue
from collections.abc import Callable
from typing import Any

import torch

from deepinfer.distributed.process_groups import ProcessGroups, open_store

_DEADLINE_SECONDS = 120.0
_PRELOADED = ["torch", "torch.distributed", "deepinfer.runtime.rank_engine"]


def _run(
    worker: Callable, rank: int, num_ranks: int, port: int, timeout_seconds: float, argument: Any, out: Any
) -> None:
    torch.set_num_threads(1)
    try:
        groups = ProcessGroups.form(
            role="decode", rank=rank, num_ranks=num_ranks, host="127.0.0.1", port=port, timeout_seconds=timeout_seconds
        )
        # Bytes, because torch would otherwise send tensors as shared memory of a process that ends.
        out.put((rank, pickle.dumps(worker(groups, argument)), None))
    except BaseException as error:
        out.put((rank, None, f"{type(error).__name__}: {error}"))
        raise


def run_ranks(worker: Callable, num_ranks: int, argument: Any, *, timeout_seconds: float = 60.0) -> list[Any]:
    """Return what `worker(groups, argument)` returned on each rank, by rank; fails when one of them raised."""
    store, port = open_store("127.0.0.1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    out = context.Queue()
    processes = [
        context.Process(target=_run, args=(worker, rank, num_ranks, port, timeout_seconds, argument, out), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < num_ranks:
            rank, value, error = out.get(timeout=_DEADLINE_SECONDS)
            assert error is None, f"rank {rank}: {error}"
            results[rank] = pickle.loads(value)
    except queue.Empty:
        raise AssertionError(f"only ranks {sorted(results)} of {num_ranks} answered") from None
    finally:
        for process in processes:
            process.join(timeout=5.0)
            process.kill()
    del store
    return [results[rank] for rank in range(num_ranks)]
