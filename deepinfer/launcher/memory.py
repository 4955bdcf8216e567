"""What a rank of each role needs of its device's memory, told before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer.config import ClusterConfig
from deepinfer.distributed.push_layout import MAX_PUSH_RANKS, link_bytes
from deepinfer.errors import ConfigError
from deepinfer.kernels.registry import KernelSet, select_kernels
from deepinfer.models.model_source import TINY_MODEL, resolve_model
from deepinfer.models.model_spec import ModelSpec, WeightBytes
from deepinfer.models.registry import load_spec, released_spec
from deepinfer.platforms.host_memory import host_memory
from deepinfer.protocol import Role
from deepinfer.runtime.build_drafts import draft_bytes_per_slot, draft_use
from deepinfer.runtime.device_memory import CPU_CACHE_BYTES, most_exchanged_rows, size_caches

_ROLES: tuple[Role, ...] = ("prefill", "decode")
# FP8 codes with one float32 a block of 128 x 128, over FP4 codes with a byte a group of 32.
_FP8_OVER_FP4 = (1 + 4 / (128 * 128)) / (1 / 2 + 1 / 32)


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """One rank of a role, in bytes. `num_tokens`: how many tokens its cache holds.

    `recast_bytes`: what the routed experts take more when a backend recasts them to FP8 (DeepGEMM on Hopper).
    `exchange_bytes`: buffers that other ranks push rows into, where all of the role's are in one host.
    `handover_bytes`: room for hand-overs within a host. `host_table_bytes`: n-gram tables in host memory, once a node.
    """

    role: str
    num_ranks: int
    weights: dict[str, int]
    exchange_bytes: int
    handover_bytes: int
    cache_bytes: int
    num_tokens: int
    recast_bytes: int
    device_bytes: int | None
    host_table_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Weights as released, buffers of the exchange, room for hand-overs, and the cache."""
        return sum(self.weights.values()) + self.exchange_bytes + self.handover_bytes + self.cache_bytes

    @property
    def left_bytes(self) -> int | None:
        """What is left of the device for steps; None when the device is not known."""
        return None if self.device_bytes is None else self.device_bytes - self.needed_bytes


def rank_memory(config: ClusterConfig, *, directory: Path | None = None) -> list[RoleMemory]:
    """Return the memory of a rank of each role. `config` is resolved; `directory` holds the checkpoint, if known.

    Nothing is downloaded. Raises ConfigError with the sums when a device can't hold it, naming role and cure.
    """
    spec = _spec(config, directory)
    device_bytes = config.cache.device_bytes
    if device_bytes is not None:
        device_bytes //= config.ranks_per_device or 1
    if config.accelerator == "cpu" and device_bytes is None:
        num_ranks = (config.prefill.ranks or 1) + (config.decode.ranks or 1)
        device_bytes = host_memory().total_bytes // num_ranks
    return [_role_memory(config, spec, role, device_bytes) for role in _ROLES]


def check_fits(config: ClusterConfig, directory: Path) -> None:
    """Raise ConfigError, before anything is started, when a rank can't fit. `config` is resolved.

    Devices whose memory is not known here are left to the ranks, which ask them before they read any weights.
    """
    if config.cache.device_bytes is not None or (config.accelerator == "cpu" and config.ray.provider == "local"):
        rank_memory(config, directory=directory)


def _spec(config: ClusterConfig, directory: Path | None) -> ModelSpec:
    path = config.model.path
    if directory is not None:
        return load_spec(directory)
    known = released_spec(path)
    if known is not None:
        return known
    if path == TINY_MODEL or Path(path).expanduser().is_dir():
        return load_spec(resolve_model(path, revision=None, cache_dir=Path(config.cache_dir)))
    raise ConfigError(f"{path} is not on this machine, so its sizes are not known", path="model.path")


def _role_memory(config: ClusterConfig, spec: ModelSpec, role: Role, device_bytes: int | None) -> RoleMemory:
    section = config.prefill if role == "prefill" else config.decode
    num_ranks = section.ranks or 1
    num_drafts = min(config.speculative.max_draft_tokens, spec.draft_block_size)
    need = spec.weight_bytes(num_ranks=num_ranks, drafts=draft_use(role, num_drafts), tables=section.ngram_tables)
    weights, experts = need.device, need.experts
    exchange_bytes = _exchange_bytes(config, spec, role, num_ranks, num_drafts=num_drafts)
    handover_bytes = config.cache.handover_bytes or 0
    held_bytes = sum(weights.values()) + exchange_bytes + handover_bytes
    cache_bytes, num_tokens = _cache(config, spec, role, held_bytes, device_bytes, num_drafts=num_drafts)
    memory = RoleMemory(
        role=role,
        num_ranks=num_ranks,
        weights=weights,
        exchange_bytes=exchange_bytes,
        handover_bytes=handover_bytes,
        cache_bytes=cache_bytes,
        num_tokens=num_tokens,
        recast_bytes=_recast_bytes(config, role, need),
        device_bytes=device_bytes,
        host_table_bytes=need.host_tables,
    )
    if memory.left_bytes is not None and memory.left_bytes < 0:
        raise ConfigError(
            f"a {role} rank needs {_gib(memory.needed_bytes)} (weights {_gib(sum(weights.values()))}, of these "
            f"{experts} {_gib(weights[experts])}, exchange {_gib(exchange_bytes)}, "
            f"hand-overs {_gib(handover_bytes)}, cache {_gib(cache_bytes)}), its "
            "device has "
            f"{_gib(memory.needed_bytes + memory.left_bytes)}; use more ranks or a smaller cache.memory_bytes "
            "or cache.handover_bytes",
            path=f"{role}.ranks",
        )
    return memory


def _exchange_bytes(config: ClusterConfig, spec: ModelSpec, role: Role, num_ranks: int, *, num_drafts: int) -> int:
    """Return what the exchange takes if all ranks are in one host; otherwise rows go through the hosts' memory."""
    if config.accelerator != "nvidia" or not 1 < num_ranks <= MAX_PUSH_RANKS:
        return 0
    block_size = spec.draft_block_size if num_drafts else 0
    shapes = spec.exchange_shapes(
        _sizing_kernels(config),
        max_rows=most_exchanged_rows(config, role, draft_block_size=block_size),
        tables=(config.prefill if role == "prefill" else config.decode).ngram_tables,
    )
    return link_bytes(shapes, num_ranks)


def _recast_bytes(config: ClusterConfig, role: Role, need: WeightBytes) -> int:
    """Return what FP8 copies of the experts take more; those that few rows of a prompt reach stay as they are."""
    if config.accelerator != "nvidia" or config.kernels.overrides.get("expert_mlp") not in (None, "deep_gemm"):
        return 0
    cuts_prompts = role == "prefill" and config.model.prefill_truncation == "compact"
    stays = need.kept_row_experts if cuts_prompts and not config.determinism.batch_invariant else 0
    return int((need.device[need.experts] - stays) * (_FP8_OVER_FP4 - 1))


def _cache(
    config: ClusterConfig,
    spec: ModelSpec,
    role: Role,
    held_bytes: int,
    device_bytes: int | None,
    *,
    num_drafts: int,
) -> tuple[int, int]:
    """Return the bytes of a rank's caches and how many tokens they hold, beside `held_bytes` of the device."""
    budget = config.cache.memory_bytes
    if budget is None and config.accelerator == "cpu":
        budget = CPU_CACHE_BYTES
    if budget is None:
        if device_bytes is None:
            raise ConfigError(
                "the cache takes a share of the device, whose size is not known here; set cache.device_bytes "
                "or cache.memory_bytes",
                path="cache.device_bytes",
            )
        budget = int(max(0, device_bytes - held_bytes) * config.cache.memory_fraction)
    groups = spec.kv_groups(
        _sizing_kernels(config), tokens_per_block=config.cache.block_size, with_drafts=num_drafts > 0
    )
    size = size_caches(
        groups,
        budget_bytes=budget,
        max_running=config.prefill.max_running if role == "prefill" else config.decode.max_running,
        max_model_len=min(config.model.max_model_len or spec.max_model_len, spec.max_model_len),
        draft_bytes_per_slot=draft_bytes_per_slot(config.speculative, num_drafts, spec.vocab_size),
    )
    num_tokens = min(
        (size.num_blocks[group.name] - 1) * group.tokens_per_block for group in groups if group.kind == "paged"
    )
    return size.num_bytes, num_tokens


def _sizing_kernels(config: ClusterConfig) -> KernelSet:
    """Return the reference, whose records and rows all backends have, so that its sizes hold on every device."""
    return select_kernels("cpu", numerics=config.kernels.numerics, batch_invariant=False, overrides={})


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
