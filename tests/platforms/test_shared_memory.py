"""Memory that another process opens: it reads what was written, whoever dies, and nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal

import msgspec
import psutil
import pytest
import torch

from deepinfer.platforms.memory_handle import MemoryHandle, UnreachableMemoryError
from deepinfer.platforms.platform import load_platform

SIZE = 5000


def _share(number: int, end) -> None:
    shared = load_platform("cpu").share_memory(SIZE)
    shared.data.copy_(torch.arange(SIZE) % 251 + number)
    end.send(shared.handle)
    end.recv()


@pytest.fixture
def owner():
    """A process with memory of its own, and that memory's handle."""
    context = multiprocessing.get_context("forkserver")
    near, far = context.Pipe()
    process = context.Process(target=_share, args=(3, far), daemon=True)
    process.start()
    assert near.poll(60)
    yield process, near.recv()
    process.kill()
    process.join()


def test_what_one_writes_the_other_reads(owner) -> None:
    _, handle = owner
    mapped = load_platform("cpu").open_memory(handle)
    assert torch.equal(mapped, (torch.arange(SIZE) % 251 + 3).to(torch.uint8))


def test_mapped_memory_outlives_its_process_which_can_be_opened_no_more(owner) -> None:
    process, handle = owner
    platform = load_platform("cpu")
    mapped = platform.open_memory(handle)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(UnreachableMemoryError, match=f"process {process.pid} can't be opened") as refused:
        platform.open_memory(handle)
    assert refused.value.owner_is_gone
    assert torch.equal(mapped, (torch.arange(SIZE) % 251 + 3).to(torch.uint8))


def test_a_handle_of_other_memory_is_refused() -> None:
    platform = load_platform("cpu")
    first = platform.share_memory(SIZE)
    handle = msgspec.msgpack.decode(first.handle, type=MemoryHandle)
    number, name = handle.details
    other = msgspec.structs.replace(handle, details=(number, name + "x"))
    with pytest.raises(UnreachableMemoryError, match="has no memory deepinfer"):
        platform.open_memory(msgspec.msgpack.encode(other))
    elsewhere = msgspec.structs.replace(handle, namespace=1)
    with pytest.raises(UnreachableMemoryError, match="another namespace") as refused:
        platform.open_memory(msgspec.msgpack.encode(elsewhere))
    assert not refused.value.owner_is_gone


def test_memory_is_given_back() -> None:
    platform = load_platform("cpu")
    gc.collect()
    before = psutil.Process().num_fds()
    for _ in range(3):
        shared = platform.share_memory(SIZE)
        mapped = platform.open_memory(shared.handle)
        mapped.fill_(7)
        assert shared.data.sum() == 7 * SIZE
        del shared, mapped
    gc.collect()
    assert psutil.Process().num_fds() == before
    assert not [line.path for line in psutil.Process().memory_maps(grouped=False) if "deepinfer-" in line.path]
