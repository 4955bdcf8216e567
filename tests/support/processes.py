"""Run a function on several real ranks: processes that have formed their process groups.

They are forked from a server that has imported torch once and started no threads: importing it takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from deepinfer.distributed.process_groups import ProcessGroups, open_store

_DEADLINE_SECONDS = 120.0
_PRELOADED = ["torch", "torch.distributed", "deepinfer.runtime.rank_engine"]


@dataclass(frozen=True)
class RankPlace:
    """Who a process is, and where its ranks meet."""

    rank: int
    num_ranks: int
    host: str
    port: int
    timeout_seconds: float

    def form_groups(self, role: str) -> ProcessGroups:
        """Meet the other ranks as `role`."""
        return ProcessGroups.form(
            role=role,
            rank=self.rank,
            num_ranks=self.num_ranks,
            host=self.host,
            port=self.port,
            meeting_seconds=60.0,
            timeout_seconds=self.timeout_seconds,
        )

    def wait_for_all(self, name: str) -> None:
        """Wait until every rank is here; each name serves once."""
        store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_seconds))
        deadline = time.monotonic() + self.timeout_seconds
        store.add(name, 1)
        while store.add(name, 0) < self.num_ranks:
            assert time.monotonic() < deadline, f"not all ranks reached {name}"
            time.sleep(0.005)


def _run(worker: Callable, place: RankPlace, argument: Any, out: Any) -> None:
    torch.set_num_threads(1)
    try:
        # Bytes, because torch would otherwise send tensors as shared memory of a process that ends.
        out.put((place.rank, pickle.dumps(worker(place, argument)), None))
    except BaseException as error:
        out.put((place.rank, None, f"{type(error).__name__}: {error}"))
        raise


def run_processes(
    worker: Callable[[RankPlace, Any], Any],
    num_ranks: int,
    argument: Any,
    *,
    timeout_seconds: float = 60.0,
    start_method: str = "forkserver",
    one_gpu_each: bool = False,
) -> list[Any]:
    """Return what `worker(place, argument)` returned on each rank, by rank; fails when one of them raised.

    `start_method` "spawn": for workers that use a GPU, which a forked process can't. `one_gpu_each`: a rank sees only
    the GPU of its number among those that this process may use, from its first import on, since some packages count
    GPUs while they are imported.
    """
    store, port = open_store("127.0.0.1")
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(_PRELOADED)
    out = context.Queue()
    places = [RankPlace(rank, num_ranks, "127.0.0.1", port, timeout_seconds) for rank in range(num_ranks)]
    processes = [context.Process(target=_run, args=(worker, place, argument, out), daemon=True) for place in places]
    for process, place in zip(processes, places, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            if one_gpu_each:
                patch.setenv("CUDA_VISIBLE_DEVICES", _gpu_name(place.rank))
            process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < num_ranks:
            rank, value, error = out.get(timeout=max(_DEADLINE_SECONDS, timeout_seconds))
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


def _gpu_name(number: int) -> str:
    """The `number`-th of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(number) if allowed is None else allowed.split(",")[number].strip()


def run_ranks(
    worker: Callable[[ProcessGroups, Any], Any],
    num_ranks: int,
    argument: Any,
    *,
    timeout_seconds: float = 60.0,
    start_method: str = "forkserver",
) -> list[Any]:
    """Like `run_processes` for a worker that takes its rank's groups, of the role "decode"."""
    workers = partial(_with_groups, worker)
    return run_processes(workers, num_ranks, argument, timeout_seconds=timeout_seconds, start_method=start_method)


def _with_groups(worker: Callable, place: RankPlace, argument: Any) -> Any:
    return worker(place.form_groups("decode"), argument)
