"""Memory of the host that other processes can map: a file without a name, which is gone with its last user."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import torch

from deepinfer.platforms.memory_handle import UnreachableMemoryError, describe_memory, read_handle, unreachable
from deepinfer.platforms.platform import SharedMemory


class _File:
    """Keeps a file open as long as it lives: by its number other processes find it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def share_pages(num_bytes: int) -> SharedMemory:
    """Return zeroed memory; pages are taken from the host as they are first written. Raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files without a name (memfd_create)")
    name = f"deepinfer-{secrets.token_hex(8)}"
    file = _File(os.memfd_create(name))
    os.ftruncate(file.number, num_bytes)
    data = torch.frombuffer(mmap.mmap(file.number, num_bytes), dtype=torch.uint8)
    return SharedMemory(data, describe_memory(num_bytes, file.number, name), file)


def open_pages(handle: bytes) -> torch.Tensor:
    """Return what `share_pages` of another process of this host returned; raises UnreachableMemoryError."""
    owner = read_handle(handle)
    number, name = owner.details
    path = Path(f"/proc/{owner.pid}/fd/{number}")
    try:
        if str(path.readlink()) != f"/memfd:{name} (deleted)":  # a process that has got the number of a dead one
            raise UnreachableMemoryError(f"process {owner.pid} has no memory {name}", owner_is_gone=True)
        file = _File(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return torch.frombuffer(mmap.mmap(file.number, owner.num_bytes), dtype=torch.uint8)
    except OSError as error:
        raise unreachable(owner, error) from error
