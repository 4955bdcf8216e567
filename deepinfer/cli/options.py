"""Options that several subcommands share, and the checked configuration that they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer.config import ClusterConfig, LoadedConfig, load_config, resolve
from deepinfer.platforms.platform import detect_accelerator

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="'tiny', a checkpoint directory or owner/name on the hub.",
        show_default=False,
    ),
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="Cluster file: its engine is used if it is up, else a private one is started.",
        show_default=False,
    ),
]
ClusterSettings = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="Cluster file whose settings hold.", show_default=False),
]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="ADDRESS", help="Address of a running Ray to use.", show_default=False),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Set a configuration field; repeatable.", show_default=False),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Debug logs, and tracebacks of errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load_options(
    cluster: Path | None, *, settings: list[str] | None, model: str | None = None, address: str | None = None
) -> LoadedConfig:
    """Return the checked configuration of the options; what depends on machines is still open. Raises ConfigError."""
    every = list(settings or ())
    if address is not None:
        every.append(f"ray.address={address}")
    return load_config(cluster, settings=every, model=model)


def read_config(cluster: Path | None, *, settings: list[str] | None) -> LoadedConfig:
    """Return the configuration of the options, resolved for this machine. Raises ConfigError."""
    loaded = load_options(cluster, settings=settings)
    return LoadedConfig(resolve(loaded.config, accelerator=detect_accelerator()), loaded.sources)


def log_level(config: ClusterConfig, *, verbose: bool) -> str:
    """Return the level of this process's log lines."""
    return "debug" if verbose else config.observability.log_level
