"""Finds what a step inside a CUDA graph may not do: shapes that depend on device data, and reading the device.

`with static_shapes(): model.forward(...)` raises, naming the operation and the line of our code, at the first one. The
kernels of a set are allowed everything, since the reference's are no example for a GPU: build the model with
`allow_ops(kernels)`. Works on CPU tensors.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import deepinfer
from deepinfer.kernels.ops import RecordFormat
from deepinfer.kernels.registry import KernelSet, op_names

_PACKAGE = str(Path(deepinfer.__file__).parent)
_OPERATIONS = {
    "_local_scalar_dense": "the host waits for a value",
    "argwhere": "the shape depends on the data",
    "bincount": "the shape depends on the data",
    "item": "the host waits for a value",
    "lift_fresh": "a tensor is made from host values",
    "masked_select": "the shape depends on the data",
    "nonzero": "the shape depends on the data",
    "unique": "the shape depends on the data",
    "_unique2": "the shape depends on the data",
    "unique_consecutive": "the shape depends on the data",
    "unique_dim": "the shape depends on the data",
}
_METHODS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"}


class NotStaticError(AssertionError):
    """A step did what it may not do inside a graph."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        fault = _OPERATIONS.get(name) or _fault_of_arguments(name, args, kwargs)
        if name == "lift_fresh" and (_sets_items() or "from_numpy(" in _place()):
            fault = None  # a number set into a slice is an argument of the kernel that fills it; a view is no copy
        if fault:
            raise _error(str(function), fault)
        return function(*args, **kwargs)


class _Methods(TorchFunctionMode):
    """Calls that a CPU tensor answers without any operation."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _METHODS and function is getattr(torch.Tensor, name, None):
            raise _error(f"Tensor.{name}", "the host waits for a value")
        if function is torch.Tensor.__setitem__ and isinstance(args[2], int | float):
            if _has_tensor(args[1]):
                raise _error("Tensor.__setitem__", "a number set at rows that a tensor names is copied to the device")
            indexes = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, torch.Tensor) for index in indexes):
                raise _error("Tensor.__setitem__", "a number goes to the device as a tensor of its own")
            return _set_item(function, args)
        return function(*args, **(kwargs or {}))


class _Allowed:
    """A kernel whose inside is not looked at."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._kernel, name)
        return _Allowed(part) if callable(part) else part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _not_looking():
            result = self._kernel(*args, **kwargs)
        if isinstance(result, RecordFormat):
            return dataclasses.replace(result, pack=_Allowed(result.pack), unpack=_Allowed(result.unpack))
        return result


def allow_op(kernel: Any) -> Any:
    """Return `kernel`, a function, so that `static_shapes` does not look into it."""
    return _Allowed(kernel)


def allow_ops(kernels: KernelSet) -> KernelSet:
    """Return `kernels` with every op wrapped, so that `static_shapes` looks at the code between the ops only."""
    return dataclasses.replace(kernels, **{name: _Allowed(getattr(kernels, name)) for name in op_names()})


@contextmanager
def static_shapes() -> Iterator[None]:
    """Raise `NotStaticError` at the first operation that a graph could not hold."""
    with _Methods(), _Operations():
        yield


@contextmanager
def _not_looking() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _fault_of_arguments(name: str, args: Any, kwargs: Any) -> str | None:
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            return "a mask as an index: the shape depends on the data"
    elif name == "repeat_interleave":
        if kwargs.get("output_size") is None:
            return "output_size is missing: the shape depends on the data"
    elif name == "_to_copy":
        if kwargs.get("device") not in (None, args[0].device):
            return f"a copy from {args[0].device} to {kwargs['device']}"
    elif name == "copy_" and args[0].device != args[1].device:
        return f"a copy from {args[1].device} to {args[0].device}"
    return None


def _has_tensor(index: Any) -> bool:
    return any(isinstance(part, torch.Tensor) for part in (index if isinstance(index, tuple) else (index,)))


def _sets_items() -> bool:
    return any(frame.name == "_set_item" for frame in traceback.extract_stack(limit=12))


def _set_item(function: Any, args: Any) -> Any:
    return function(*args)


def _place() -> str:
    ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_PACKAGE)]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}: {ours[-1].line}" if ours else "outside deepinfer"


def _error(operation: str, fault: str) -> NotStaticError:
    return NotStaticError(f"{operation}: {fault} ({_place()})")
