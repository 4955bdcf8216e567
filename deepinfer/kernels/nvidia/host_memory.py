"""Host memory that kernels read in place: registered with the driver, which pins it, or a pinned copy."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.log import get_logger

_PAGE = 4096
_READ_ONLY = 8  # cudaHostRegisterReadOnly: memory that is mapped without the right to write
_log = get_logger("kernels")


@dataclass(slots=True, frozen=True, weakref_slot=True)
class HostMemory:
    """`tensor` has the values of `source`; kernels read it as long as this object lives.

    It keeps `source` too, so that nothing else comes to lie where that lay.
    """

    tensor: Tensor
    source: Tensor


def device_readable(source: Tensor) -> HostMemory | None:
    """Return `source`, a tensor of the host, or a pinned copy, such that kernels of the current device can read it.

    None, with a warning, where neither is possible: too little memory to pin.
    """
    address = _register(source)
    if address is not None:
        memory = HostMemory(source, source)
        # the driver would go on reading the old pages there if something else were mapped at that address later
        weakref.finalize(memory, _unregister, address).atexit = False
        return memory
    size = source.nbytes / 2**30
    try:
        copied = torch.empty_like(source, pin_memory=True).copy_(source)
    except RuntimeError as error:
        _log.warning(
            "%.1f GiB of host memory can't be read by the device (%s): the host reads them for it", size, error
        )
        return None
    _log.warning("%.1f GiB of host memory can't be pinned where they lie: the device reads a copy", size)
    return HostMemory(copied, source)


def _register(tensor: Tensor) -> int | None:
    """Pin the pages of `tensor` and return where they begin.

    None where the driver refuses, as it does for files on some file systems, and where a part is registered already.
    """
    first = tensor.data_ptr() // _PAGE * _PAGE
    num_bytes = tensor.data_ptr() + tensor.nbytes - first
    runtime = torch.cuda.cudart()
    for flags in (0, _READ_ONLY):
        if int(runtime.cudaHostRegister(first, num_bytes, flags)) == 0:
            return first
        _forget_error()
    return None


def _unregister(address: int) -> None:
    """Undo `_register`."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_error()


def _forget_error() -> None:
    """Take the error of a refused call from the runtime, which else reports it again at whatever is launched next."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
