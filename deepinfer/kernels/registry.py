"""Which implementations exist, what they can do, and the frozen set that one rank uses."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from deepinfer.errors import ConfigError
from deepinfer.kernels import ops, step_ops
from deepinfer.log import get_logger

# backend -> its modules; each has IMPLEMENTATIONS. A module is imported only when its backend is considered; one that
# needs an optional package has `probe()`, which runs one tiny call.
_BACKENDS: Final[dict[str, tuple[str, ...]]] = {
    "reference": (
        "deepinfer.kernels.reference.attention",
        "deepinfer.kernels.reference.cache",
        "deepinfer.kernels.reference.draft_rows",
        "deepinfer.kernels.reference.engram",
        "deepinfer.kernels.reference.gemm",
        "deepinfer.kernels.reference.hyper_connection",
        "deepinfer.kernels.reference.index_select",
        "deepinfer.kernels.reference.moe",
        "deepinfer.kernels.reference.norm",
        "deepinfer.kernels.reference.sampling",
        "deepinfer.kernels.reference.step_lists",
    ),
    "triton": (
        "deepinfer.kernels.nvidia.advance",
        "deepinfer.kernels.nvidia.attention",
        "deepinfer.kernels.nvidia.cache",
        "deepinfer.kernels.nvidia.draft_rows",
        "deepinfer.kernels.nvidia.engram",
        "deepinfer.kernels.nvidia.experts",
        "deepinfer.kernels.nvidia.gemm",
        "deepinfer.kernels.nvidia.hyper_connection",
        "deepinfer.kernels.nvidia.index_select",
        "deepinfer.kernels.nvidia.latent_records",
        "deepinfer.kernels.nvidia.moe",
        "deepinfer.kernels.nvidia.norm",
        "deepinfer.kernels.nvidia.open_streams",
        "deepinfer.kernels.nvidia.routing",
        "deepinfer.kernels.nvidia.sampling",
        "deepinfer.kernels.nvidia.step_lists",
    ),
    "cublas": ("deepinfer.kernels.nvidia.cublas",),
    "deep_gemm": ("deepinfer.kernels.nvidia.deep_gemm",),
    "deep_gemm_bf16": ("deepinfer.kernels.nvidia.deep_gemm_bf16",),
    "flash_mla": ("deepinfer.kernels.nvidia.flash_mla",),
}
# optional backend -> what a start without it costs, measured on an H200 at the released shapes
_COST_WITHOUT: Final = {
    "deep_gemm": "experts run from FP4 weights, with many rows 2 to 3 times slower, other quantised linears in bf16",
    "deep_gemm_bf16": "in batch-invariant mode products in bf16 run in Triton, up to 1.4 times slower",
    "flash_mla": "sparse attention runs in Triton, 2 to 3 times slower",
    "triton": "every small kernel falls back to torch: for tests only",
}
# platform -> device type, and its backends by preference
_PLATFORMS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "cpu": ("cpu", ("reference",)),
    "nvidia": ("cuda", ("flash_mla", "deep_gemm", "cublas", "deep_gemm_bf16", "triton", "reference")),
}
_log = get_logger("kernels")
_NUMERICS: Final = {"reference": ops.REFERENCE_NUMERICS, "fp32": ops.FP32_NUMERICS}


@dataclass(slots=True, frozen=True)
class Implementation:
    """One implementation of the op `op`: `build` returns the callable for given numerics.

    `device_types`: torch device types; `dtypes`: model dtypes; `batch_invariant`: a row's bits depend on that row only.
    `released_numerics_only`: it needs FP8 activations and packed caches. `package`: what it calls besides our code.
    `verified_chips`: chips ("sm_90") on which its tests passed; `required_chips`: the only ones it runs on, if any.
    """

    op: str
    build: Callable[[ops.Numerics], Any]
    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    batch_invariant: bool
    released_numerics_only: bool = False
    package: str = "torch"
    verified_chips: tuple[str, ...] = ()
    required_chips: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class Backend:
    """A loaded backend: its implementations by op, or why it can't be used here (`fault`) and what that costs."""

    name: str
    implementations: dict[str, Implementation]
    fault: str | None

    @property
    def cost_without(self) -> str:
        """What a start without this backend costs."""
        return _COST_WITHOUT.get(self.name, "other backends take its place")


@dataclass(slots=True, frozen=True)
class KernelChoice:
    """Which backend and implementation serves each op (`entries`), out of `backends`, the preferred one first.

    `unverified`: ops whose implementation names the chips it was tested on, and `chip` (None on a CPU) is none of them.
    """

    numerics: ops.Numerics
    chip: str | None
    entries: dict[str, tuple[str, Implementation]]
    backends: tuple[Backend, ...]
    unverified: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class KernelSet:
    """One implementation per op, and the backend that each came from. A model reaches its kernels through this.

    `batch_invariant`: that was asked of all of them.
    """

    numerics: ops.Numerics
    backends: dict[str, str]
    batch_invariant: bool
    record_formats: ops.RecordFormats
    store_rows: ops.StoreRows
    linear: ops.Linear
    rough_linear: ops.RoughLinear
    quantized_linear: ops.QuantizedLinear
    grouped_linear: ops.GroupedLinear
    rms_norm: ops.RMSNorm
    rotate: ops.Rotate
    mix_coefficients: ops.MixCoefficientsOf
    open_streams: ops.OpenStreams
    collapse_streams: ops.CollapseStreams
    update_streams: ops.UpdateStreams
    advance_streams: ops.AdvanceStreams
    engram_rows: ops.EngramRows
    engram_lookup: ops.EngramLookup
    engram_gate: ops.EngramGate
    pair_compress: ops.PairCompress
    latent_records: ops.LatentRecords
    locate_entries: ops.LocateEntries
    index_select: ops.IndexSelect
    sparse_attention: ops.SparseAttention
    route_tokens: ops.RouteTokens
    expert_mlp: ops.ExpertMLP
    combine_experts: ops.CombineExperts
    gumbel_argmax: ops.GumbelArgmax
    lay_out_rows: step_ops.LayOutRows
    list_rows: step_ops.ListRows
    token_history: step_ops.TokenHistory
    accept_rows: step_ops.AcceptRows
    read_slots: step_ops.ReadSlots
    write_tokens: step_ops.WriteTokens
    draft_blocks: step_ops.DraftBlocks

    def describe(self) -> dict[str, str]:
        """Return op -> backend, for logs, digests and bug reports."""
        return dict(self.backends)


def op_names() -> tuple[str, ...]:
    """Return the names of all ops of a kernel set."""
    others = ("numerics", "backends", "batch_invariant")
    return tuple(field.name for field in dataclasses.fields(KernelSet) if field.name not in others)


def select_kernels(
    platform_name: str,
    *,
    numerics: Literal["reference", "fp32"] | ops.Numerics,
    batch_invariant: bool,
    overrides: dict[str, str],
) -> KernelSet:
    """Build the implementations that `choose_kernels` picks.

    A backend that can't be used is passed over with a warning that says what this costs.
    """
    choice = choose_kernels(platform_name, numerics=numerics, batch_invariant=batch_invariant, overrides=overrides)
    for backend in choice.backends:
        if backend.fault is not None:
            _log.warning("kernels %s can't be used (%s): %s", backend.name, backend.fault, backend.cost_without)
    if choice.unverified:
        _log.warning("not tested on %s: %s", choice.chip, ", ".join(choice.unverified))
    built = {op: entry.build(choice.numerics) for op, (_, entry) in choice.entries.items()}
    names = {op: name for op, (name, _) in choice.entries.items()}
    return KernelSet(numerics=choice.numerics, backends=names, batch_invariant=batch_invariant, **built)


def choose_kernels(
    platform_name: str,
    *,
    numerics: Literal["reference", "fp32"] | ops.Numerics,
    batch_invariant: bool,
    overrides: dict[str, str],
) -> KernelChoice:
    """Pick the first fitting implementation of every op, in the platform's order of backends.

    `overrides` (op -> backend) fixes a backend for an op. Raises `ConfigError` naming the op when nothing fits.
    """
    chosen = numerics if isinstance(numerics, ops.Numerics) else _NUMERICS[numerics]
    device_type, order = _platform(platform_name)
    _check_overrides(overrides)
    wanted = _Wanted(device_type, _chip(device_type), chosen, batch_invariant)
    loaded = {name: load_backend(name, device_type) for name in dict.fromkeys((*order, *overrides.values()))}
    entries = {op: _pick(op, (overrides[op],) if op in overrides else order, loaded, wanted) for op in op_names()}
    unverified = sorted(op for op, (_, entry) in entries.items() if wanted.is_unverified(entry))
    return KernelChoice(chosen, wanted.chip, entries, tuple(loaded.values()), tuple(unverified))


@dataclass(slots=True, frozen=True)
class _Wanted:
    """What an implementation has to fit; `chip` is None on a CPU."""

    device_type: str
    chip: str | None
    numerics: ops.Numerics
    batch_invariant: bool

    def fits(self, entry: Implementation) -> bool:
        """True when `entry` can be used."""
        numerics = self.numerics
        is_released = numerics.quantise_activations and numerics.quantise_caches
        return (
            self.device_type in entry.device_types
            and numerics.dtype in entry.dtypes
            and (entry.batch_invariant or not self.batch_invariant)
            and (is_released or not entry.released_numerics_only)
            and (not entry.required_chips or self.chip in entry.required_chips)
        )

    def is_unverified(self, entry: Implementation) -> bool:
        """True when `entry` names the chips it was tested on and this one is not among them."""
        return bool(entry.verified_chips) and self.chip not in entry.verified_chips


def load_backend(name: str, device_type: str) -> Backend:
    """Import a backend's modules and probe them; what goes wrong is kept as the backend's `fault`."""
    found: dict[str, Implementation] = {}
    try:
        for path in _BACKENDS[name]:
            module = importlib.import_module(path)
            if device_type == "cuda" and hasattr(module, "probe"):
                module.probe()
            found |= {entry.op: entry for entry in module.IMPLEMENTATIONS}
    except Exception as error:  # whatever a foreign package raises, the start goes on without it
        if name == "reference":
            raise
        return Backend(name, {}, f"{type(error).__name__}: {error}")
    return Backend(name, found, None)


def backend_names(platform_name: str) -> tuple[str, ...]:
    """Return the backends of a platform, the preferred one first."""
    return _platform(platform_name)[1]


def _platform(name: str) -> tuple[str, tuple[str, ...]]:
    if name not in _PLATFORMS:
        raise ConfigError(f"{name!r} has no kernels; known are {sorted(_PLATFORMS)}", path="accelerator")
    return _PLATFORMS[name]


def _chip(device_type: str) -> str | None:
    if device_type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _pick(op: str, names: tuple[str, ...], loaded: dict[str, Backend], wanted: _Wanted) -> tuple[str, Implementation]:
    for name in names:
        entry = loaded[name].implementations.get(op)
        if entry is not None and wanted.fits(entry):
            return name, entry
    faults = "".join(f"; {name}: {loaded[name].fault}" for name in names if loaded[name].fault)
    raise ConfigError(_nothing_fits(op, names, wanted) + faults, path="kernels")


def _check_overrides(overrides: dict[str, str]) -> None:
    for op, backend in overrides.items():
        if op not in op_names():
            raise ConfigError(f"no op of this name; known are {', '.join(op_names())}", path=f"kernels.overrides.{op}")
        if backend not in _BACKENDS:
            raise ConfigError(
                f"{backend!r} is no backend; known are {sorted(_BACKENDS)}", path=f"kernels.overrides.{op}"
            )


def _nothing_fits(op: str, backends: tuple[str, ...], wanted: _Wanted) -> str:
    kind = f"{'batch-invariant ' if wanted.batch_invariant else ''}{wanted.numerics.dtype} on {wanted.device_type}"
    return f"no implementation of op {op!r} for {kind} in backends {', '.join(backends)}"
