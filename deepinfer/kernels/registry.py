"""Which implementations exist, what they can do, and the frozen set that one rank uses."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from deepinfer.errors import ConfigError
from deepinfer.kernels import ops

# backend -> its modules; each has IMPLEMENTATIONS. A module is imported only when its backend is considered.
_BACKENDS: Final[dict[str, tuple[str, ...]]] = {
    "reference": (
        "deepinfer.kernels.reference.attention",
        "deepinfer.kernels.reference.cache",
        "deepinfer.kernels.reference.engram",
        "deepinfer.kernels.reference.gemm",
        "deepinfer.kernels.reference.hyper_connection",
        "deepinfer.kernels.reference.index_select",
        "deepinfer.kernels.reference.moe",
        "deepinfer.kernels.reference.norm",
    ),
}
# platform -> device type, and its backends by preference
_PLATFORMS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "cpu": ("cpu", ("reference",)),
    "nvidia": ("cuda", ("reference",)),
}
_NUMERICS: Final = {"reference": ops.REFERENCE_NUMERICS, "fp32": ops.FP32_NUMERICS}


@dataclass(slots=True, frozen=True)
class Implementation:
    """One implementation of the op `op`: `build` returns the callable for given numerics.

    `device_types`: torch device types; `dtypes`: model dtypes; `batch_invariant`: a row's bits depend on that row only.
    """

    op: str
    build: Callable[[ops.Numerics], Any]
    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    batch_invariant: bool


@dataclass(slots=True, frozen=True)
class KernelSet:
    """One implementation per op, and the backend that each came from. A model reaches its kernels through this."""

    numerics: ops.Numerics
    backends: dict[str, str]
    record_formats: ops.RecordFormats
    store_rows: ops.StoreRows
    linear: ops.Linear
    quantized_linear: ops.QuantizedLinear
    grouped_linear: ops.GroupedLinear
    rms_norm: ops.RMSNorm
    rotate: ops.Rotate
    mix_coefficients: ops.MixCoefficientsOf
    collapse_streams: ops.CollapseStreams
    update_streams: ops.UpdateStreams
    engram_rows: ops.EngramRows
    engram_lookup: ops.EngramLookup
    engram_gate: ops.EngramGate
    pair_compress: ops.PairCompress
    index_select: ops.IndexSelect
    sparse_attention: ops.SparseAttention
    route_tokens: ops.RouteTokens
    swiglu: ops.SwiGLU
    expert_mlp: ops.ExpertMLP
    combine_experts: ops.CombineExperts

    def describe(self) -> dict[str, str]:
        """Return op -> backend, for logs, digests and bug reports."""
        return dict(self.backends)


def op_names() -> tuple[str, ...]:
    """Return the names of all ops of a kernel set."""
    return tuple(field.name for field in dataclasses.fields(KernelSet) if field.name not in ("numerics", "backends"))


def select_kernels(
    platform_name: str,
    *,
    numerics: Literal["reference", "fp32"] | ops.Numerics,
    batch_invariant: bool,
    overrides: dict[str, str],
) -> KernelSet:
    """Pick the first fitting implementation of every op, in the platform's order of backends.

    `overrides` (op -> backend) fixes a backend for an op. Raises `ConfigError` naming the op when nothing fits.
    """
    if platform_name not in _PLATFORMS:
        raise ConfigError(f"{platform_name!r} has no kernels; known are {sorted(_PLATFORMS)}", path="accelerator")
    chosen = numerics if isinstance(numerics, ops.Numerics) else _NUMERICS[numerics]
    device_type, order = _PLATFORMS[platform_name]
    _check_overrides(overrides)
    tables = {name: _load_backend(name) for name in {*order, *overrides.values()}}
    backends, built = {}, {}
    for op in op_names():
        names = (overrides[op],) if op in overrides else order
        for name in names:
            found = tables[name].get(op)
            if found is not None and _fits(found, device_type, chosen.dtype, batch_invariant):
                backends[op], built[op] = name, found.build(chosen)
                break
        else:
            raise ConfigError(_nothing_fits(op, names, device_type, chosen.dtype, batch_invariant), path="kernels")
    return KernelSet(numerics=chosen, backends=backends, **built)


def _check_overrides(overrides: dict[str, str]) -> None:
    for op, backend in overrides.items():
        if op not in op_names():
            raise ConfigError(f"no op of this name; known are {', '.join(op_names())}", path=f"kernels.overrides.{op}")
        if backend not in _BACKENDS:
            raise ConfigError(
                f"{backend!r} is no backend; known are {sorted(_BACKENDS)}", path=f"kernels.overrides.{op}"
            )


def _load_backend(name: str) -> dict[str, Implementation]:
    modules = (importlib.import_module(module) for module in _BACKENDS[name])
    implementations: Iterable[Implementation] = (entry for module in modules for entry in module.IMPLEMENTATIONS)
    return {implementation.op: implementation for implementation in implementations}


def _fits(entry: Implementation, device_type: str, dtype: torch.dtype, batch_invariant: bool) -> bool:
    able = device_type in entry.device_types and dtype in entry.dtypes
    return able and (entry.batch_invariant or not batch_invariant)


def _nothing_fits(
    op: str, backends: tuple[str, ...], device_type: str, dtype: torch.dtype, batch_invariant: bool
) -> str:
    wanted = f"{'batch-invariant ' if batch_invariant else ''}{dtype} on {device_type}"
    return f"no implementation of op {op!r} for {wanted} in backends {', '.join(backends)}"
