"""`deepinfer doctor`: what is on this machine, which kernels would run and which settings are in force."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from deepinfer import __version__
from deepinfer.cli.options import AsJson, ClusterSettings, Settings, Verbose, read_config
from deepinfer.config import ENVIRONMENT, ClusterConfig, LoadedConfig, config_fields
from deepinfer.errors import ConfigError
from deepinfer.kernels.registry import KernelChoice, choose_kernels
from deepinfer.log import set_up_logging
from deepinfer.platforms.devices import describe_devices, describe_toolchain
from deepinfer.platforms.host_memory import host_memory
from deepinfer.platforms.platform import detect_accelerator

_PACKAGES = ("torch", "ray", "safetensors", "tokenizers", "deepseek-recipe", "xgrammar")
_KERNEL_PACKAGES = ("triton", "sgl-deep-gemm", "apache-tvm-ffi", "sgl-flash-mla")
_DEEP_EP = ("sgl-deep-ep", "deep_ep")  # packaged, and as its sources name it
_UNUSED_PACKAGES = {
    "tilelang": "TileLang: optional, nothing here calls it",
    "tile-kernels": "TileKernels: asks for torch 2.13; our Triton kernels do the same work",
    "deepselect": "DeepSelect: not packaged, and for SM100 alone; our own kernel selects",
}
_DEEP_EP_USE = (
    "carries rows between ranks in several hosts; packages ask for torch 2.13 or 2.14; version 2.1.0 with NCCL 2.30.7, "
    "built for torch 2.11, was verified on two H200 of one host, never between hosts"
)
_SHARED_MEMORY = Path("/dev/shm")


def doctor(
    cluster: ClusterSettings = None, settings: Settings = None, as_json: AsJson = False, verbose: Verbose = False
) -> None:
    """Show accelerators, packages, the kernels that would run, memory, and the settings in force with their source.

    Example: deepinfer doctor --json
    """
    set_up_logging("debug" if verbose else "warning")
    facts = examine(read_config(cluster, settings=settings))
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for title, section in facts.items():
        print("\n".join([title, *(_lines(section) or ["  all default"])]))


def examine(loaded: LoadedConfig) -> dict[str, dict[str, Any]]:
    """Return the facts by section, all of them plain JSON values."""
    return {
        "software": _software(),
        "accelerators": _accelerators(loaded.config),
        **_kernels(loaded.config),
        "memory": _memory(Path(loaded.config.cache_dir)),
        "settings": _settings(loaded),
        "environment": _environment(loaded),
    }


def _software() -> dict[str, Any]:
    versions = {name: _version(name) for name in _PACKAGES}
    return {"deepinfer": __version__, "python": platform.python_version(), "system": platform.platform()} | versions


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _accelerators(config: ClusterConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {"detected": detect_accelerator(), "chosen": config.accelerator, "cpus": os.cpu_count()}
    devices = {f"gpu {index}": text for index, text in enumerate(describe_devices())}
    packages = {name: _version(name) for name in _KERNEL_PACKAGES}
    return facts | (devices or {"gpus": "none that torch can use"}) | describe_toolchain() | packages


def _kernels(config: ClusterConfig) -> dict[str, dict[str, Any]]:
    """Return what serves each op, and which backends can be used.

    A choice that can't be made is a fact here, not a failure of the command.
    """
    if config.accelerator != "cpu" and not describe_devices():
        return {"kernels": {"not chosen": "this machine has no GPU; doctor says more on one of the ranks' machines"}}
    try:
        choice = choose_kernels(
            config.accelerator,
            numerics=config.kernels.numerics,
            batch_invariant=config.determinism.batch_invariant,
            overrides=config.kernels.overrides,
        )
    except ConfigError as error:
        return {"kernels": {"not usable": str(error)}}
    facts = {"kernels": _entries(choice), "kernel backends": _backends(choice)}
    if choice.chip is None:
        return facts
    return facts | {"optional packages": _optional_packages(), "packages that are not used": _unused_packages()}


def _entries(choice: KernelChoice) -> dict[str, Any]:
    return {
        op: {
            "backend": name,
            "package": entry.package,
            "batch_invariant": entry.batch_invariant,
            "verified_chips": list(entry.verified_chips),
            "verified_here": op not in choice.unverified,
        }
        for op, (name, entry) in choice.entries.items()
    }


def _backends(choice: KernelChoice) -> dict[str, Any]:
    return {
        backend.name: "usable" if backend.fault is None else f"passed over: {backend.fault}; {backend.cost_without}"
        for backend in choice.backends
    }


def _optional_packages() -> dict[str, str]:
    found = [f"{name} {_version(name)}" for name in _DEEP_EP if _version(name) != "not installed"]
    state = ", ".join(found) or "not installed"
    return {"DeepEP": f"{state}; {_DEEP_EP_USE}"}


def _unused_packages() -> dict[str, str]:
    return {name: f"{_version(name)}; {reason}" for name, reason in _UNUSED_PACKAGES.items()}


def _memory(cache_dir: Path) -> dict[str, Any]:
    memory = host_memory()
    facts = {"total": _gib(memory.total_bytes), "available": _gib(memory.free_bytes)}
    if _SHARED_MEMORY.exists():
        facts["shared memory free (Ray's object store)"] = _gib(shutil.disk_usage(_SHARED_MEMORY).free)
    folder = next(path for path in (cache_dir, *cache_dir.parents) if path.exists())
    return facts | {f"disk free ({cache_dir})": _gib(shutil.disk_usage(folder).free)}


def _settings(loaded: LoadedConfig) -> dict[str, Any]:
    fields = config_fields(loaded.config)
    return {path: {"value": fields[path], "source": loaded.sources.get(path, "default")} for path in fields}


def _environment(loaded: LoadedConfig) -> dict[str, Any]:
    """Return each variable with what it does now: sets its field, is overruled, or isn't set."""
    fields = config_fields(loaded.config)
    return {
        variable.name: {
            "meaning": variable.meaning,
            "field": variable.path,
            "value": fields[variable.path],
            "source": loaded.sources.get(variable.path, "default"),
        }
        for variable in ENVIRONMENT
    }


def _lines(section: dict[str, Any]) -> list[str]:
    """Return a section as text. A setting that has its default is left to --json, a variable never is."""
    width = max(len(name) for name in section)
    lines = []
    for name, value in section.items():
        if not isinstance(value, dict):
            lines.append(f"  {name:<{width}}  {value}")
        elif "backend" in value:
            lines.append(f"  {name:<{width}}  {_kernel_line(value)}")
        elif value["source"] != "default" or "meaning" in value:
            lines.append(f"  {name:<{width}}  {value['value']}  ({value['source']})")
    return lines


def _kernel_line(entry: dict[str, Any]) -> str:
    invariant = "batch-invariant" if entry["batch_invariant"] else "not batch-invariant"
    chips = f"verified on {', '.join(entry['verified_chips'])}" if entry["verified_chips"] else "verified"
    here = "" if entry["verified_here"] else ", NOT on this chip"
    return f"{entry['backend']:<10} {entry['package']:<14} {invariant:<20} {chips}{here}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
