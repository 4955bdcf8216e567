"""Configuration: frozen structs, read once from YAML, `DEEPINFER_*` variables and `--set`, checked before any work.

Order of strength: `--set`, environment, YAML, default. No other module reads `DEEPINFER_*`; Ray's own variables belong
to the launcher. The kernel compilers' are set here.
Unknown keys and variables are refused with the nearest good name; what is not built yet is refused by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from deepinfer.errors import ConfigError
from deepinfer.settings_tree import assign, convert, flatten, name_of, nearest, parse_setting, read_yaml

Accelerator = Literal["auto", "cpu", "nvidia", "ascend"]
TablePlace = Literal["host", "sharded"]
MAX_DRAFT_TOKENS = 5  # of the released model's draft block
DEFAULT_MODEL = "deepseek-ai/DeepSeek-V4.1-Flash-1017"


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common options of every config struct."""


class ModelSource(_Section, frozen=True, kw_only=True):
    """Which checkpoint: `tiny`, a directory, or a Hugging Face repository (with `revision`).

    `max_model_len` caps prompt + output tokens of one sequence; None: what the checkpoint allows.
    `prefill_truncation` compact: the decoder's layers run on the last `prefill_keep_tokens` tokens of a prompt only
    (None: window + 12), as the model was trained; with `prompt_logprobs` a request runs them on all. off: always all.
    """

    path: str = DEFAULT_MODEL
    revision: str | None = None
    max_model_len: int | None = None
    prefill_truncation: Literal["off", "compact"] = "compact"
    prefill_keep_tokens: int | None = None


class RayConfig(_Section, frozen=True, kw_only=True):
    """How to reach or start Ray.

    `object_store_bytes` None: sized from the hand-overs in flight. `port` and `dashboard_port` of a Ray that
    `deepinfer-cluster up` starts; None: free ones (local), 6379 and 8265 (ssh). ssh: `hosts`, the first is the head;
    `domains`, the hosts of each scale-up domain (one switch between all their devices) that spans several, by its name;
    `ssh_command` is put before the host's name, `python` is the interpreter on every host (None: the same path as
    here). kuberay: `image` of all pods.
    """

    provider: Literal["local", "ssh", "kuberay", "existing"] = "local"
    address: str | None = None
    namespace: str = "deepinfer"
    runtime_env: dict[str, Any] = {}
    object_store_bytes: int | None = None
    temp_dir: str | None = None
    dashboard: bool = False
    port: int | None = None
    dashboard_port: int | None = None
    hosts: tuple[str, ...] = ()
    domains: dict[str, tuple[str, ...]] = {}
    ssh_command: tuple[str, ...] = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    python: str | None = None
    image: str = "deepinfer:latest"


class PrefillConfig(_Section, frozen=True, kw_only=True):
    """The prefill group. `ranks` None: 2 on CPU, 1 on a single GPU. `max_running`: prompts in work on one rank.

    `max_tokens_per_step` None: 2,048 on a CPU; 8,192 on a GPU, which reads the weights of all experts in every step.
    `ngram_tables` host: the checkpoint's files, mapped, one copy in the memory of a node for all its ranks. sharded:
    spread over the devices of the group's ranks.
    """

    ranks: int | None = None
    ranks_per_node: int | None = None
    attention: Literal["dp", "cp"] = "dp"
    max_running: int = 16
    max_tokens_per_step: int | None = None
    ngram_tables: TablePlace = "host"

    @property
    def step_tokens(self) -> int:
        """`max_tokens_per_step` of a resolved config."""
        assert self.max_tokens_per_step is not None, "the config must be resolved"
        return self.max_tokens_per_step


class DecodeConfig(_Section, frozen=True, kw_only=True):
    """The decode group. `ranks` None: 4 on CPU, 1 on a single GPU. `max_running`: sequences running on one rank.

    `ngram_tables`: see the prefill group. `graphs` auto: steps are padded to a few sizes and run as recorded graphs,
    where the device and the exchange between ranks can; off: every step launches its operations anew.
    """

    ranks: int | None = None
    ranks_per_node: int | None = None
    max_running: int = 64
    redundant_experts: int = 0
    graphs: Literal["auto", "off"] = "auto"
    ngram_tables: TablePlace = "host"


class CacheConfig(_Section, frozen=True, kw_only=True):
    """KV cache of a rank. `memory_bytes` None: `memory_fraction` of what is free for it (GPU), 256 MiB (CPU).

    `device_bytes`: memory of a device of the cluster, for `deepinfer-cluster render` on a machine without one.
    `handover_bytes`: what each rank holds of its device for hand-overs between ranks of one host, which then stay on
    the device as long as there is room; others, and all with 0, go through the object store. None: 1 GiB of a GPU
    unless the ranks need more than one host, 16 MiB on a CPU.
    """

    block_size: int = 64
    memory_bytes: int | None = None
    memory_fraction: float = 0.9
    device_bytes: int | None = None
    handover_bytes: int | None = None
    prefix_caching: bool = False
    kv_channel: Literal["object_store"] = "object_store"


class SchedulerConfig(_Section, frozen=True, kw_only=True):
    """The driver's and the ranks' scheduling.

    `max_in_flight`: requests that a client may have open at the driver. `publish_seconds`: how long a rank gathers
    results before it answers. `max_kv_bytes_in_flight` bounds hand-overs between prefill and decode.
    `step_timeout_seconds`: a rank whose step takes longer counts as hung. `job_timeout_seconds`: a client of a shared
    engine that is silent for so long counts as dead, and its requests are given up. `orphan_timeout_seconds`: so long
    loaded ranks of a shared engine wait for a new driver when theirs has died; then they end. `asynchronous` false:
    plan a step only after the results of the last one (for comparison; answers are the same).
    """

    max_in_flight: int = 1024
    publish_seconds: float = 0.2
    max_kv_bytes_in_flight: int = 512 * 1024 * 1024
    max_logprob_bytes: int = 256 * 1024 * 1024
    step_timeout_seconds: float = 120.0
    start_timeout_seconds: float = 600.0
    placement_timeout_seconds: float = 60.0
    job_timeout_seconds: float = 60.0
    orphan_timeout_seconds: float = 600.0
    asynchronous: bool = True


class SpeculativeConfig(_Section, frozen=True, kw_only=True):
    """DSpark drafts: `max_draft_tokens` a step and sequence, 0 .. 5; `varlen`: verify fewer where confidence is low.

    `verifier` "shared_noise": same output as without drafts. "rejection": same distribution, somewhat more accepted.
    """

    max_draft_tokens: int = 5
    varlen: bool = False
    verifier: Literal["shared_noise", "rejection"] = "shared_noise"


class ExpertConfig(_Section, frozen=True, kw_only=True):
    """Expert balancing."""

    rebalance: bool = False


class DeterminismConfig(_Section, frozen=True, kw_only=True):
    """`batch_invariant`: only kernels and a dispatcher whose rows do not depend on the rest of the batch."""

    batch_invariant: bool = False


class KernelConfig(_Section, frozen=True, kw_only=True):
    """`numerics` "fp32" runs the CPU backend without any quantisation (parity tests). `overrides`: op -> backend."""

    numerics: Literal["reference", "fp32"] = "reference"
    overrides: dict[str, str] = {}


class ObservabilityConfig(_Section, frozen=True, kw_only=True):
    """Logs and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_interval_seconds: float = 2.0


class ClusterConfig(_Section, frozen=True, kw_only=True):
    """A whole engine. Built by `load_config`; `resolve` fills what depends on the machine, once.

    `ranks_per_device`: ranks of either role that share one GPU and its memory. None: 2 when neither `prefill.ranks` nor
    `decode.ranks` is given, so that 1 + 1 ranks run on a single GPU; else 1. Without meaning on a CPU.
    """

    name: str = "deepinfer"
    accelerator: Accelerator = "auto"
    ranks_per_device: int | None = None
    model: ModelSource = ModelSource()
    ray: RayConfig = RayConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    experts: ExpertConfig = ExpertConfig()
    determinism: DeterminismConfig = DeterminismConfig()
    kernels: KernelConfig = KernelConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    cache_dir: str = "~/.cache/deepinfer"


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """One `DEEPINFER_*` variable: the config field it sets, its type in words, and its meaning."""

    name: str
    path: str
    kind: Literal["text", "integer", "switch"]
    meaning: str


ENVIRONMENT = (
    EnvironmentVariable("DEEPINFER_ACCELERATOR", "accelerator", "text", "nvidia, ascend or cpu"),
    EnvironmentVariable("DEEPINFER_HF_MODEL_DIR", "model.path", "text", "local checkpoint instead of the hub cache"),
    EnvironmentVariable("DEEPINFER_ENABLE_MTP_VARLEN", "speculative.varlen", "switch", "variable-length verification"),
    EnvironmentVariable("DEEPINFER_USE_NEXTN_DECODE", "speculative.max_draft_tokens", "integer", "draft length, 0 off"),
    EnvironmentVariable("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "model.prefill_truncation", "text", "off or compact"),
    EnvironmentVariable("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "model.prefill_keep_tokens", "integer", "kept suffix"),
    EnvironmentVariable("DEEPINFER_BATCH_INVARIANT", "determinism.batch_invariant", "switch", "batch-invariant mode"),
    EnvironmentVariable("DEEPINFER_CACHE_DIR", "cache_dir", "text", "compiled kernels, cost tables, tiny checkpoint"),
)

# What `cache.handover_bytes` is unless it is set; with more GPUs than a host has, nothing is handed over within one.
_GPU_HANDOVER_BYTES = 1 << 30
_CPU_HANDOVER_BYTES = 16 << 20
_MAX_HOST_DEVICES = 8

# Options that hold a mapping of the user's.
_MAPPINGS = ("ray.runtime_env", "ray.domains", "kernels.overrides")

# Fields of features that are not built yet, with the only value that is accepted until they are.
_NOT_AVAILABLE: dict[str, object] = {
    "prefill.attention": "dp",
    "decode.redundant_experts": 0,
    "cache.prefix_caching": False,
    "experts.rebalance": False,
}

_POSITIVE = (
    "ranks_per_device",
    "model.max_model_len",
    "model.prefill_keep_tokens",
    "ray.object_store_bytes",
    "prefill.ranks",
    "prefill.ranks_per_node",
    "prefill.max_running",
    "prefill.max_tokens_per_step",
    "decode.ranks",
    "decode.ranks_per_node",
    "decode.max_running",
    "cache.block_size",
    "cache.memory_bytes",
    "cache.device_bytes",
    "scheduler.max_in_flight",
    "scheduler.publish_seconds",
    "scheduler.max_kv_bytes_in_flight",
    "scheduler.max_logprob_bytes",
    "scheduler.step_timeout_seconds",
    "scheduler.start_timeout_seconds",
    "scheduler.placement_timeout_seconds",
    "scheduler.job_timeout_seconds",
    "scheduler.orphan_timeout_seconds",
    "observability.metrics_interval_seconds",
)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config and where each value that is no default came from (dotted path -> "file", variable or "--set")."""

    config: ClusterConfig
    sources: dict[str, str]


def load_config(
    file: str | Path | None = None,
    *,
    settings: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    model: str | None = None,
) -> LoadedConfig:
    """Return the checked config of `file` (None: defaults), the environment and `settings` ("a.b=value").

    `model` is the `--model` option, as strong as `--set model.path=...`. `environ` None reads the process's own.
    Raises ConfigError naming the field, variable or option.
    """
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        tree = read_yaml(Path(file))
        if isinstance(tree.get("model"), str):
            tree["model"] = {"path": tree["model"]}
        sources.update(dict.fromkeys(flatten(tree, _MAPPINGS), "file"))
    for variable, value in _read_environment(os.environ if environ is None else environ):
        assign(tree, variable.path, value)
        sources[variable.path] = variable.name
    if model is not None:
        settings = [*settings, f"model.path={model}"]
    for setting in settings:
        path, value = parse_setting(setting)
        path = "model.path" if path == "model" else path
        assign(tree, path, value)
        sources[path] = "--set"
    config = convert(tree, ClusterConfig, sources)
    _check(config, sources)
    return LoadedConfig(config, sources)


def resolve(config: ClusterConfig, *, accelerator: str) -> ClusterConfig:
    """Return `config` with every automatic choice made for a machine whose best accelerator is `accelerator`."""
    chosen: Accelerator = accelerator if config.accelerator == "auto" else config.accelerator  # type: ignore[assignment]
    ranks = {"cpu": (2, 4)}.get(chosen, (1, 1))
    step_tokens = config.prefill.max_tokens_per_step or (2048 if chosen == "cpu" else 8192)
    shares_device = chosen != "cpu" and config.prefill.ranks is None and config.decode.ranks is None
    ranks_per_device = config.ranks_per_device or (2 if shares_device else 1)
    num_prefill, num_decode = config.prefill.ranks or ranks[0], config.decode.ranks or ranks[1]
    handover_bytes = config.cache.handover_bytes
    if handover_bytes is None:
        fits_host = num_prefill + num_decode <= _MAX_HOST_DEVICES * ranks_per_device
        handover_bytes = _CPU_HANDOVER_BYTES if chosen == "cpu" else fits_host * _GPU_HANDOVER_BYTES
    return msgspec.structs.replace(
        config,
        accelerator=chosen,
        ranks_per_device=ranks_per_device,
        prefill=msgspec.structs.replace(config.prefill, ranks=num_prefill, max_tokens_per_step=step_tokens),
        decode=msgspec.structs.replace(config.decode, ranks=num_decode),
        cache=msgspec.structs.replace(config.cache, handover_bytes=handover_bytes),
        cache_dir=str(Path(config.cache_dir).expanduser()),
    )


def keep_compiled_kernels(cache_dir: str | Path, *, rank_name: str) -> None:
    """Have this process keep the GPU kernels that it compiles below `cache_dir`, unless the user has chosen a place.

    Triton's folder is shared by the ranks of a machine; DeepGEMM's is not, since processes that fill one folder at the
    same time can read half-written files (its issue 301).
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(cache_dir) / "triton"))
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(Path(cache_dir) / "deep_gemm" / rank_name))


def encode_config(config: ClusterConfig) -> bytes:
    """Return `config` as msgpack bytes for another process."""
    return msgspec.msgpack.encode(config)


def decode_config(data: bytes) -> ClusterConfig:
    """Return the config in `data` from `encode_config`."""
    return msgspec.msgpack.decode(data, type=ClusterConfig)


def config_fields(config: ClusterConfig) -> dict[str, Any]:
    """Return every field by dotted path, in declaration order."""
    return flatten(msgspec.to_builtins(config), _MAPPINGS)


def all_paths() -> list[str]:
    """Return the dotted path of every option (a mapping such as `ray.runtime_env` is one option)."""
    return list(config_fields(ClusterConfig()))


def _read_environment(environ: Mapping[str, str]) -> list[tuple[EnvironmentVariable, Any]]:
    known = {variable.name: variable for variable in ENVIRONMENT}
    values = []
    for name in sorted(environ):
        if not name.startswith("DEEPINFER_") or environ[name] == "":
            continue
        if name not in known:
            raise ConfigError(f"unknown environment variable{nearest(name, known)}", path=name)
        values.append((known[name], _parse_variable(known[name], environ[name])))
    return values


def _parse_variable(variable: EnvironmentVariable, text: str) -> Any:
    if variable.kind == "switch":
        if text not in ("0", "1"):
            raise ConfigError(f"{text!r} is neither 0 nor 1", path=variable.name)
        return text == "1"
    if variable.kind == "integer":
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{text!r} is no integer", path=variable.name) from None
    return text


def _check(config: ClusterConfig, sources: Mapping[str, str]) -> None:
    fields = config_fields(config)
    for path, neutral in _NOT_AVAILABLE.items():
        if fields[path] != neutral:
            message = f"{fields[path]!r} is not available yet; leave it out or set {neutral!r}"
            raise ConfigError(message, path=name_of(path, sources))
    for path in _POSITIVE:
        value = fields[path]
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"must be above 0 and finite, not {value}", path=name_of(path, sources))
    _check_speculative(config, sources)
    if config.accelerator == "ascend":
        message = "'ascend' is not available yet; use 'nvidia' or 'cpu'"
        raise ConfigError(message, path=name_of("accelerator", sources))
    if config.cache.block_size % 2:
        raise ConfigError(f"must be even, not {config.cache.block_size}", path="cache.block_size")
    if (config.cache.handover_bytes or 0) < 0:
        raise ConfigError(f"must be 0 or more, not {config.cache.handover_bytes}", path="cache.handover_bytes")
    if not 0 < config.cache.memory_fraction <= 1:
        raise ConfigError(f"must lie in (0, 1], not {config.cache.memory_fraction}", path="cache.memory_fraction")


def _check_speculative(config: ClusterConfig, sources: Mapping[str, str]) -> None:
    path, drafts = "speculative.max_draft_tokens", config.speculative.max_draft_tokens
    if not 0 <= drafts <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"must lie in 0 .. {MAX_DRAFT_TOKENS}, not {drafts}", path=name_of(path, sources))
    if config.speculative.verifier == "rejection" and config.determinism.batch_invariant:
        raise ConfigError(
            "'rejection' makes the output depend on how many drafts were verified; with determinism.batch_invariant "
            "use 'shared_noise'",
            path="speculative.verifier",
        )
