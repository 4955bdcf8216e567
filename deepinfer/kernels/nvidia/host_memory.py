"""Host memory that kernels read in place: pinned, or registered with the driver, which pins it too."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from deepinfer.log import get_logger

_PAGE = 4096
_READ_ONLY = 8  # cudaHostRegisterReadOnly: memory that is mapped without the right to write
_ALREADY_REGISTERED = 712
_log = get_logger("kernels")


def device_readable(tensor: Tensor) -> Tensor | None:
    """`tensor` of the host, or a pinned copy, such that kernels of the current device read it for the process' life.

    None, with a warning, where neither is possible: too little memory to pin.
    """
    if tensor.is_pinned() or _register(tensor):
        return tensor
    size = tensor.nbytes / 2**30
    try:
        copied = tensor.pin_memory()
    except RuntimeError as error:
        _log.warning(
            "%.1f GiB of host memory can't be read by the device (%s): the host reads them for it", size, error
        )
        return None
    _log.warning("%.1f GiB of mapped memory can't be pinned where they lie: the device reads a copy", size)
    return copied


def _register(tensor: Tensor) -> bool:
    """Pin the pages of `tensor`; False where the driver refuses, as it does for files on some file systems."""
    first = tensor.data_ptr() // _PAGE * _PAGE
    num_bytes = tensor.data_ptr() + tensor.nbytes - first
    runtime = torch.cuda.cudart()
    for flags in (0, _READ_ONLY):
        code = int(runtime.cudaHostRegister(first, num_bytes, flags))
        if code != 0:
            _forget_error()
        if code == 0:
            return True
        if code == _ALREADY_REGISTERED:
            return _ends_are_pinned(tensor)
    return False


def _ends_are_pinned(tensor: Tensor) -> bool:
    """False where only part is registered: by a mapping that lay here before, or that shares a page."""
    flat = tensor.view(torch.uint8).flatten()
    return flat[:1].is_pinned() and flat[-1:].is_pinned()


def _forget_error() -> None:
    """Take the error of a refused call from the runtime, which else reports it again at whatever is launched next."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
