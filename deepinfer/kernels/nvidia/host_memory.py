"""Host memory that kernels read in place: pinned, or registered with the driver, which pins it too."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.log import get_logger

_PAGE = 4096
_READ_ONLY = 8  # cudaHostRegisterReadOnly: memory that is mapped without the right to write
_ALREADY_REGISTERED = 712
_log = get_logger("kernels")


def share_with_device(tensor: Tensor) -> bool:
    """Let kernels of the current device read `tensor` of the host where it lies, for the life of the process.

    False, with a warning, where the driver refuses: mapped files on some file systems, or too little memory to pin.
    """
    if tensor.is_pinned():
        return True
    first = tensor.data_ptr() // _PAGE * _PAGE
    num_bytes = tensor.data_ptr() + tensor.nbytes - first
    runtime = torch.cuda.cudart()
    for flags in (0, _READ_ONLY):
        status = int(runtime.cudaHostRegister(first, num_bytes, flags))
        if status in (0, _ALREADY_REGISTERED):
            return True
    _log.warning(
        "%.1f GiB of host memory can't be read by the device in place (CUDA error %d): the host reads them for it,"
        " and steps that use them can't be recorded",
        num_bytes / 2**30,
        status,
    )
    return False
