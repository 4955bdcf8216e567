"""Whether a job may use a running engine: equal settings, the same checkpoint, the same version of this package."""

from __future__ import annotations

from deepinfer import __version__
from deepinfer.actors.engine_facts import EngineFacts
from deepinfer.config import ClusterConfig, config_fields
from deepinfer.errors import ConfigError

# What a client may set for itself. The checkpoint counts by its digest, wherever it lies.
_OWN = ("ray.", "observability.", "cache_dir", "scheduler.max_in_flight", "model.path", "model.revision")


def check_joinable(config: ClusterConfig, model_digest: str, facts: EngineFacts) -> None:
    """Raise ConfigError with every difference between what a job wants and what the engine is."""
    wanted, running = config_fields(config), config_fields(facts.config)
    differences = [
        f"{path}: the engine has {running[path]!r}, this job asks for {wanted[path]!r}"
        for path in wanted
        if not path.startswith(_OWN) and wanted[path] != running[path]
    ]
    ready = facts.ranks[0]
    if ready.model_digest != model_digest:
        differences.append(
            f"model: the engine has loaded {facts.config.model.path} with the digest {ready.model_digest[:12]}, "
            f"this job asks for {config.model.path} with {model_digest[:12]}"
        )
    if ready.version != __version__:
        differences.append(f"version: the engine is deepinfer {ready.version}, this job is {__version__}")
    if differences:
        raise ConfigError(
            f"the running engine {facts.name!r} is another one than asked for; {'; '.join(differences)}. "
            "Ask for the same, or take the engine down and bring it up again",
            path="cluster",
        )
