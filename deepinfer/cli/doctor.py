"""`deepinfer doctor`: what is on this machine and which settings are in force."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil

from deepinfer import __version__
from deepinfer.cli.options import AsJson, Cluster, Settings, read_config
from deepinfer.config import ENVIRONMENT, ClusterConfig, LoadedConfig, config_fields
from deepinfer.errors import ConfigError
from deepinfer.kernels.registry import select_kernels
from deepinfer.platforms.devices import describe_devices
from deepinfer.platforms.platform import detect_accelerator

_PACKAGES = ("torch", "ray", "triton", "safetensors", "tokenizers", "flash-mla", "deep-gemm", "deep-ep")
_SHARED_MEMORY = Path("/dev/shm")


def doctor(cluster: Cluster = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Show accelerators, packages, memory, and the settings in force with their source.

    Example: deepinfer doctor --json
    """
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
        "kernels": _kernels(loaded.config),
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
    return facts | {f"gpu {index}": text for index, text in enumerate(describe_devices())}


def _kernels(config: ClusterConfig) -> dict[str, Any]:
    """Return op -> backend; a choice that can't be made is a fact here, not a failure of the command."""
    try:
        return select_kernels(
            config.accelerator,
            numerics=config.kernels.numerics,
            batch_invariant=config.determinism.batch_invariant,
            overrides=config.kernels.overrides,
        ).describe()
    except ConfigError as error:
        return {"not usable": str(error)}


def _memory(cache_dir: Path) -> dict[str, Any]:
    memory = psutil.virtual_memory()
    facts = {"total": _gib(memory.total), "available": _gib(memory.available)}
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
        elif value["source"] != "default" or "meaning" in value:
            lines.append(f"  {name:<{width}}  {value['value']}  ({value['source']})")
    return lines


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
