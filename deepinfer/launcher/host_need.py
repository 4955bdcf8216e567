"""Whether this machine's memory holds an engine on CPUs and all its processes, told before weights are loaded.

A rank of a GPU asks for its memory itself before it reads any weights; on a CPU the kernel would kill it instead.
"""

from __future__ import annotations

from pathlib import Path

from deepinfer.config import ClusterConfig
from deepinfer.errors import ConfigError
from deepinfer.launcher.memory import rank_memory
from deepinfer.platforms.host_memory import host_memory

# What processes hold of their own, measured with the tiny model and Ray 2.60 on Linux (Pss_Anon in smaps_rollup).
_RANK_PROCESS_BYTES = 220 << 20
_RAY_BYTES = 600 << 20  # its node and its dashboard
_DRIVER_BYTES = 60 << 20


def host_need(config: ClusterConfig, directory: Path, *, with_ray: bool) -> dict[str, int]:
    """Return the bytes that an engine on CPUs takes of one machine, by part. `config` is resolved.

    `with_ray`: Ray itself is still to be started. Mapped n-gram tables are left out, since their pages can be dropped.
    """
    roles = rank_memory(config, directory=directory)
    return {
        "weights": sum(memory.num_ranks * sum(memory.weights.values()) for memory in roles),
        "caches": sum(memory.num_ranks * memory.cache_bytes for memory in roles),
        "hand-overs": sum(memory.num_ranks * memory.handover_bytes for memory in roles),
        "processes": sum(memory.num_ranks for memory in roles) * _RANK_PROCESS_BYTES
        + _DRIVER_BYTES
        + with_ray * _RAY_BYTES,
    }


def check_host(config: ClusterConfig, directory: Path, *, with_ray: bool) -> None:
    """Raise ConfigError with the sums when less is free than `host_need`. Ranks on GPUs are left to themselves."""
    if config.accelerator != "cpu":
        return
    parts = host_need(config, directory, with_ray=with_ray)
    needed, memory = sum(parts.values()), host_memory()
    if needed <= memory.free_bytes:
        return
    by_part = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    raise ConfigError(
        f"the engine needs {_gib(needed)} of this host's memory ({by_part}), {_gib(memory.free_bytes)} of "
        f"{_gib(memory.total_bytes)} are free; use fewer ranks, a smaller cache.memory_bytes, or more memory",
        path="decode.ranks",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
