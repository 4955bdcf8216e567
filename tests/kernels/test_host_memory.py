"""Host memory is registered for as long as it is used, else copied, else left to the host, which a graph can't hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from deepinfer.kernels.nvidia import engram, host_memory
from deepinfer.kernels.nvidia.host_memory import device_readable
from deepinfer.kernels.ops import REFERENCE_NUMERICS

_OVERLAPS = 712  # cudaErrorHostMemoryAlreadyRegistered


class _Runtime:
    """The two calls of CUDA's runtime; like it, it refuses what overlaps with something registered."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.registered: dict[int, int] = {}
        self._refuses = refuses

    def cudaHostRegister(self, first: int, num_bytes: int, _flags: int) -> int:  # noqa: N802
        overlaps = any(first < other + size and other < first + num_bytes for other, size in self.registered.items())
        if overlaps or self._refuses:
            return _OVERLAPS
        self.registered[first] = num_bytes
        return 0

    def cudaHostUnregister(self, first: int) -> int:  # noqa: N802
        del self.registered[first]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[_Runtime]:
    fake = _Runtime(refuses=getattr(request, "param", False))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(host_memory, "_forget_error", lambda: None)
    return fake


def test_memory_is_registered_as_long_as_it_is_used(runtime: _Runtime) -> None:
    """What is mapped at the same address later is not taken for what lay there before."""
    table = torch.arange(5000, dtype=torch.uint8)
    memory = device_readable(table)
    assert memory is not None
    assert memory.tensor is table
    (first, num_bytes), *others = runtime.registered.items()
    assert not others
    assert first <= table.data_ptr()
    assert first + num_bytes == table.data_ptr() + table.nbytes
    del memory
    assert not runtime.registered


def test_memory_is_kept_while_it_is_registered(runtime: _Runtime) -> None:
    memory = device_readable(torch.full((9,), 7, dtype=torch.uint8))
    assert memory is not None
    assert memory.source.tolist() == [7] * 9


@pytest.mark.parametrize("runtime", [True], indirect=True)
def test_what_can_not_be_pinned_is_left_to_the_host(
    runtime: _Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a graph can't hold such a look-up."""

    def pinned(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(torch, "empty_like", pinned)
    table, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)
    look_up = engram.EngramLookup(REFERENCE_NUMERICS)
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        assert not look_up.capturable(table, scale, device=torch.device("cuda", 0))
    assert "no memory to pin" in caplog.text
    assert look_up.capturable(table, scale, device=torch.device("cpu"))


@pytest.mark.parametrize("runtime", [True], indirect=True)
def test_what_is_not_registered_is_copied(runtime: _Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda tensor, *, pin_memory: empty_like(tensor))
    table = torch.arange(96, dtype=torch.uint8).view(3, 32)
    memory = device_readable(table)
    assert memory is not None
    assert memory.tensor.data_ptr() != table.data_ptr()
    assert torch.equal(memory.tensor, table)
    assert engram.EngramLookup(REFERENCE_NUMERICS).capturable(table, table, device=torch.device("cuda", 0))
