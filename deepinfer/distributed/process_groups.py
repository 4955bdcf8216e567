"""The process groups of one role's ranks, formed from a store that rank 0 keeps open.

Two groups, because two threads use them: `dispatch` belongs to the device thread, `sync` to the step thread. Groups are
plain objects: nothing is registered with torch's process-wide default group.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from deepinfer.errors import RankError


def open_store(host: str) -> tuple[TCPStore, int]:
    """Open the rendezvous on rank 0's address `host`; returns the store and its port.

    The port is picked by the system and never freed in between, so nobody can take it. The caller keeps the store
    alive as long as the ranks live.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    return store, store.port


class Group:
    """Collectives of equal calls on all ranks of one group. One thread at a time; a failure raises RankError."""

    def __init__(self, group: Any, *, role: str, rank: int, num_ranks: int) -> None:
        """Wrap a formed gloo group of torch."""
        self._group = group
        self.role = role
        self.rank = rank
        self.num_ranks = num_ranks

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return [num_ranks, n]: the `values` [n] of every rank, by rank."""
        gathered = [torch.empty_like(values) for _ in range(self.num_ranks)]
        try:
            self._group.allgather([gathered], [values]).wait()
        except RuntimeError as error:
            raise self._failure("all-gather", error) from error
        return torch.stack(gathered)

    def all_to_all(self, rows: torch.Tensor, *, send: list[int], receive: list[int]) -> torch.Tensor:
        """Send `send[r]` rows of `rows` to each rank r, in order; returns the rows received, `receive[r]` from rank r.

        Any dtype: bytes travel. `rows` [N, ...] is contiguous, N = sum(send); both lists may hold zeros.
        """
        assert rows.is_contiguous()
        assert sum(send) == len(rows), f"{len(rows)} rows, but {send} to send"
        arrived = torch.empty((sum(receive), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        try:
            self._group.alltoall_base(_as_bytes(arrived), _as_bytes(rows), receive, send, dist.AllToAllOptions()).wait()
        except RuntimeError as error:
            raise self._failure("all-to-all", error) from error
        return arrived

    def _failure(self, what: str, error: RuntimeError) -> RankError:
        return RankError(
            f"the {what} of {self.num_ranks} ranks failed; a rank is gone or hangs ({error})",
            role=self.role,
            rank=self.rank,
        )


@dataclass(slots=True)
class ProcessGroups:
    """The groups of one rank. `store` is kept because the groups use it."""

    dispatch: Group
    sync: Group
    store: TCPStore

    @classmethod
    def form(
        cls,
        *,
        role: str,
        rank: int,
        num_ranks: int,
        host: str,
        port: int,
        meeting_seconds: float,
        timeout_seconds: float,
    ) -> ProcessGroups:
        """Meet the other ranks at the store `host`:`port`, at most for `meeting_seconds`; returns when all are there.

        Each rank binds to the interface that leads to `host`, so host names need not resolve. `timeout_seconds` holds
        for each later collective. Raises RankError that names the ranks that did not come.
        """
        store = None
        try:
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=meeting_seconds))
            store.set(_arrival(role, rank), "")
            store.wait([_arrival(role, other) for other in range(num_ranks)], timedelta(seconds=meeting_seconds))
            address = _own_address(host, port)
            dispatch, sync = (
                Group(
                    _connect(PrefixStore(f"{role}/{name}", store), rank, num_ranks, address, timeout_seconds),
                    role=role,
                    rank=rank,
                    num_ranks=num_ranks,
                )
                for name in ("dispatch", "sync")
            )
        except (RuntimeError, OSError) as error:
            missing = [] if store is None else _missing(store, role, num_ranks)
            who = f"ranks {missing} did not come to" if missing else f"{num_ranks} ranks could not meet at"
            message = f"{who} {host}:{port} within {meeting_seconds:g} s ({error})"
            raise RankError(message, role=role, rank=rank) from error
        return cls(dispatch, sync, store)


def _arrival(role: str, rank: int) -> str:
    return f"{role}/arrived/{rank}"


def _missing(store: TCPStore, role: str, num_ranks: int) -> list[int]:
    try:
        return [rank for rank in range(num_ranks) if not store.check([_arrival(role, rank)])]
    except RuntimeError:  # the store itself is gone
        return []


def _connect(store: PrefixStore, rank: int, num_ranks: int, address: str, timeout_seconds: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs leave its methods out
    options = gloo._Options()  # noqa: SLF001  the only way to name an interface without an environment variable
    options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_seconds)  # noqa: SLF001
    return gloo(store, rank, num_ranks, options)


def _own_address(host: str, port: int) -> str:
    """Return this machine's address on the interface that leads to `host`; nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return (
        rows.reshape(len(rows), -1).view(torch.uint8)
        if rows.numel()
        else rows.new_empty((len(rows), 1), dtype=torch.uint8)
    )
