"""What another process is told so that it can open memory of this one, and what it finds when it can't."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import psutil


class UnreachableMemoryError(Exception):
    """Memory of another process can't be opened here. `owner_is_gone`: because that process has ended."""

    def __init__(self, text: str, *, owner_is_gone: bool) -> None:
        """`text` says what was tried."""
        super().__init__(text)
        self.owner_is_gone = owner_is_gone


class MemoryHandle(msgspec.Struct, frozen=True):
    """`num_bytes` of the process `pid`; `details` are the platform's own. A pid holds within its `namespace` only."""

    pid: int
    namespace: int
    num_bytes: int
    details: tuple[Any, ...]


def describe_memory(num_bytes: int, *details: Any) -> bytes:
    """Return the handle of memory of this process."""
    handle = MemoryHandle(pid=os.getpid(), namespace=_namespace(), num_bytes=num_bytes, details=details)
    return msgspec.msgpack.encode(handle)


def read_handle(handle: bytes) -> MemoryHandle:
    """Return what `handle` says; raises UnreachableMemoryError for a process that can't be seen from here."""
    found = msgspec.msgpack.decode(handle, type=MemoryHandle)
    if found.namespace != _namespace():
        text = f"process {found.pid} runs in another namespace of processes, in a container or on another host"
        raise UnreachableMemoryError(text, owner_is_gone=False)
    return found


def unreachable(handle: MemoryHandle, error: Exception) -> UnreachableMemoryError:
    """Return why memory could not be opened, after the attempt failed with `error`."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    text = f"memory of process {handle.pid} can't be opened: {reason}"
    return UnreachableMemoryError(text, owner_is_gone=_is_gone(handle.pid))


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _namespace() -> int:
    """The number of this process's namespace of processes, 0 where a system has none."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
