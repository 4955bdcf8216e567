"""Settings that only the model can judge, looked at before anything is started."""

from __future__ import annotations

from pathlib import Path

from deepinfer.config import ClusterConfig
from deepinfer.models.registry import load_spec


def check_model_settings(config: ClusterConfig, directory: Path) -> None:
    """Raise ConfigError for a setting that the model in `directory` does not allow, with its value and the cure."""
    if config.model.prefill_truncation == "compact" and config.model.prefill_keep_tokens is not None:
        load_spec(directory).prompt_keep_tokens(
            config.model.prefill_keep_tokens, max_draft_tokens=config.speculative.max_draft_tokens
        )
