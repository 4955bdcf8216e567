"""Which dispatchers serve a rank, and what they share."""

from __future__ import annotations

import importlib
import socket
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.push_layout import MAX_PUSH_RANKS
from deepinfer.distributed.token_dispatcher import ExchangeShape, TokenDispatcher
from deepinfer.distributed.torch_dispatcher import TorchDispatcher
from deepinfer.log import get_logger

_Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
_LOGGER = get_logger("exchange")


class Link(Protocol):
    """What the dispatchers of a rank share that may be recorded; see `push_dispatcher.PushLink`."""

    def rehearsal(self) -> AbstractContextManager[None]: ...

    def check(self) -> None: ...


class Dispatchers:
    """Opens the dispatchers of a rank, one for each number of logical experts, and speaks for all of them."""

    def __init__(self, make: Callable[[int], TokenDispatcher], link: Link | None = None) -> None:
        """`make(num_experts)` opens one; `link` is what they share, if they do."""
        self._make = make
        self._link = link
        self._opened: dict[int, TokenDispatcher] = {}

    def __call__(self, num_experts: int) -> TokenDispatcher:
        """Return the dispatcher for `num_experts` logical experts."""
        if num_experts not in self._opened:
            self._opened[num_experts] = self._make(num_experts)
        return self._opened[num_experts]

    def recording(self, capture: _Capture) -> _Capture:
        """Return `capture` such that a rank may record by itself: no other rank hears of it until the replay."""
        link = self._link
        if link is None:
            return capture

        def record(work: Callable[[], Any]) -> Callable[[], Any]:
            with link.rehearsal():
                return capture(work)

        return record

    def check(self) -> None:
        """Raise RankError if an exchange that has ended on the device went wrong there."""
        if self._link is not None:
            self._link.check()


def open_dispatchers(
    groups: ProcessGroups | None, shapes: Sequence[ExchangeShape], *, device: torch.device, timeout_seconds: float
) -> Dispatchers:
    """Return the dispatchers of a rank whose exchanges have `shapes`; a collective. `groups` None: it is alone.

    Up to eight ranks with GPUs of their own in one host push. Others with such GPUs use DeepEP where every
    rank has it. The rest goes through the process group: the hosts' memory. Only pushing is recorded.
    """
    if groups is None:
        return Dispatchers(LocalDispatcher)
    through_hosts = partial(TorchDispatcher, groups.dispatch)
    if device.type != "cuda":
        return Dispatchers(through_hosts)
    in_one_host, have_own_gpus = _look_around(groups, device)
    if in_one_host and have_own_gpus and groups.dispatch.num_ranks <= MAX_PUSH_RANKS:
        module = importlib.import_module("deepinfer.distributed.push_dispatcher")
        link = module.open_link(groups, shapes, device=device, timeout_seconds=timeout_seconds)
        if link is not None:
            return Dispatchers(partial(module.PushDispatcher, link), link)
    module = importlib.import_module("deepinfer.distributed.deep_ep_dispatcher")
    package = _deep_ep() if have_own_gpus else None
    deep_ep = module.open_deep_ep(package, groups, shapes, device=device, timeout_seconds=timeout_seconds)
    if deep_ep is not None:
        return Dispatchers(partial(module.make_dispatcher, deep_ep, through_hosts))
    _LOGGER.warning("ranks exchange rows through their hosts' memory, and no step is recorded: this is slow")
    return Dispatchers(through_hosts)


def _deep_ep() -> ModuleType | None:
    """Return the package, or None where it is missing or refuses to work with what is installed beside it."""
    try:
        return importlib.import_module("deep_ep")
    except Exception as error:  # it checks versions by assertions of its own
        _LOGGER.info("DeepEP can't be used: %s: %s", type(error).__name__, error)
        return None


def _look_around(groups: ProcessGroups, device: torch.device) -> tuple[bool, bool]:
    """Whether all ranks are in one host, and whether each has a GPU of its own; a collective."""
    own = [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)]
    gathered = groups.dispatch.all_gather(torch.tensor([zlib.crc32(name.encode()) for name in own]))
    return len(gathered[:, 0].unique()) == 1, len(gathered[:, 1].unique()) == len(gathered)
