"""The command `deepinfer-cluster`: engines that stay up, so that many jobs share one load of the weights.

Exit codes: 0 done, 1 the engine or its Ray failed, 2 usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import enum
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepinfer.actors.rank_life import RankProgram
from deepinfer.cli.cluster_tables import memory_table, op_table, rank_table
from deepinfer.cli.main import interrupt, run_app
from deepinfer.cli.options import AsJson, Settings, Verbose, load_options, log_level, read_config
from deepinfer.config import ClusterConfig
from deepinfer.errors import ClusterError
from deepinfer.launcher import ClusterRecord, bring_up, connected, read_logs, read_status, take_down
from deepinfer.launcher.kuberay import render_kuberay
from deepinfer.launcher.memory import rank_memory
from deepinfer.launcher.profiles import profile_ranks
from deepinfer.launcher.providers import render_ray
from deepinfer.log import set_up_logging
from deepinfer.models.model_digest import model_digest
from deepinfer.models.model_source import resolve_model

_PIPE_COLUMNS = 160

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Cluster file, e.g. cluster_configs/cpu-tiny.yaml.")]


class RenderFormat(enum.StrEnum):
    """What `render` writes."""

    RAY = "ray"
    KUBERAY = "kuberay"


app = typer.Typer(
    name="deepinfer-cluster",
    help=(
        "Bring engines up and down; jobs then share them.\n\n"
        "Example: deepinfer-cluster up cluster_configs/cpu-tiny.yaml"
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run `deepinfer-cluster` with `arguments` and return its exit code."""
    return run_app(lambda: app, arguments, name="deepinfer-cluster")


@app.command()
def up(file: ConfigFile, settings: Settings = None, verbose: Verbose = False) -> None:
    """Start Ray where needed, load the weights and wait until every rank is ready. Twice is harmless.

    Example: deepinfer-cluster up cluster_configs/cpu-tiny.yaml
    """
    config = load_options(file, settings=settings).config
    set_up_logging(log_level(config, verbose=verbose))
    cache_dir = Path(config.cache_dir).expanduser()
    directory = resolve_model(config.model.path, revision=config.model.revision, cache_dir=cache_dir)
    record, facts = bring_up(
        config, model_directory=str(directory), model_digest=model_digest(directory), program=RankProgram()
    )
    print(f"engine {facts.name} is ready: {len(facts.ranks)} ranks on the Ray at {record.address}")
    if record.dashboard_url:
        print(f"dashboard: {record.dashboard_url}")
    print("next:")
    for line in _next_commands(record, file.resolve()):
        print(f"  {line}")


@app.command()
def down(
    file: ConfigFile,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", min=0, help="How long running sequences may take to their end.")
    ] = 60.0,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Let running sequences end, then stop what `up` started and nothing else.

    Example: deepinfer-cluster down cluster_configs/cpu-tiny.yaml
    """
    config = _read(file, settings, verbose=verbose)
    was_up = take_down(config, drain_seconds=drain_seconds)
    print(f"engine {config.name} is down" if was_up else f"engine {config.name} was not up")


@app.command()
def status(file: ConfigFile, as_json: AsJson = False, settings: Settings = None, verbose: Verbose = False) -> None:
    """Show the engine's state, its ranks, and what they are doing.

    Example: deepinfer-cluster status cluster_configs/cpu-tiny.yaml --json
    """
    config = _read(file, settings, verbose=verbose, default_level="warning")
    numbers = read_status(config)
    if as_json:
        print(json.dumps(numbers, indent=2))
        return
    console = _console()
    console.print(f"engine {numbers['engine']}: {numbers['state']}", highlight=False)
    for name in ("fatal", "address", "dashboard", "version"):
        if numbers.get(name):
            console.print(f"{name}: {numbers[name]}", highlight=False)
    if "requests" in numbers:
        console.print(rank_table(numbers))
        jobs = ", ".join(f"{job} ({count} requests)" for job, count in numbers["jobs"].items()) or "none"
        console.print(f"open jobs: {jobs}", highlight=False)
        counts = ", ".join(f"{name.removeprefix('num_')} {count}" for name, count in numbers["requests"].items())
        console.print(f"sequences: {counts}", highlight=False)
    elif "ranks" in numbers:
        for rank, phase in numbers["ranks"].items():
            console.print(f"{rank}: {phase}", highlight=False)


@app.command()
def logs(
    file: ConfigFile,
    rank: Annotated[
        str | None,
        typer.Option("--rank", metavar="N", help="driver, prefill-0, decode-3, or N for that rank of both roles."),
    ] = None,
    num_lines: Annotated[int, typer.Option("--lines", min=1, help="Last lines of each process.")] = 100,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Print the log lines of the driver and the ranks.

    Example: deepinfer-cluster logs cluster_configs/cpu-tiny.yaml --rank decode-3
    """
    config = _read(file, settings, verbose=verbose, default_level="warning")
    with connected(config) as record:
        if record is None:
            raise ClusterError(f"the engine {config.name} is not up: bring it up with deepinfer-cluster up {file}")
        for name, text in read_logs(config, which=rank, num_lines=num_lines):
            for line in text.splitlines():
                print(f"{name}: {line}")


@app.command()
def profile(
    file: ConfigFile,
    rank: Annotated[str, typer.Option("--rank", metavar="N", help="prefill-0, decode-3, or N for both roles' rank N.")],
    num_steps: Annotated[int, typer.Option("--steps", min=1, help="How many steps.")] = 5,
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the traces go.")] = Path(),
    wait_seconds: Annotated[float, typer.Option("--wait-seconds", min=0, help="How long to wait for steps.")] = 60.0,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Record a rank's next steps with torch's profiler, while jobs go on: a Chrome trace, and a table by operation.

    Example: deepinfer-cluster profile cluster_configs/cpu-tiny.yaml --rank decode-0 --steps 20
    """
    config = _read(file, settings, verbose=verbose, default_level="warning")
    with connected(config) as record:
        if record is None:
            raise ClusterError(f"the engine {config.name} is not up: bring it up with deepinfer-cluster up {file}")
        profiles = profile_ranks(config, which=rank, num_steps=num_steps, wait_seconds=wait_seconds)
    console = _console()
    folder.mkdir(parents=True, exist_ok=True)
    for name, taken in profiles.items():
        if taken is None:
            continue
        path = folder / f"{config.name}-{name}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json.gz"
        path.write_bytes(taken.trace)
        console.print(op_table(name, taken))
        if taken.num_steps < num_steps:
            print(f"{name} had work for {taken.num_steps} of {num_steps} steps only")
        print(f"trace: {path.resolve()} ({len(taken.trace):,} bytes); open it in https://ui.perfetto.dev")
    idle = [name for name, taken in profiles.items() if taken is None]
    if idle:
        raise ClusterError(
            f"{' and '.join(idle)} ran no step for {wait_seconds:g} s; run a job meanwhile, or wait longer "
            "(--wait-seconds)"
        )


@app.command()
def render(
    file: ConfigFile,
    output: Annotated[
        RenderFormat, typer.Option("--format", help="ray: the commands that `up` runs. kuberay: manifests.")
    ] = RenderFormat.RAY,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Show what `up` would start and, on stderr, the memory of a rank; refuse what can't fit. Starts nothing.

    Example: deepinfer-cluster render cluster_configs/sm100-64.yaml --format kuberay
    """
    config = _read(file, settings, verbose=verbose)
    Console(stderr=True).print(memory_table(rank_memory(config)))
    print(render_kuberay(config) if output is RenderFormat.KUBERAY else render_ray(config), end="")


def _console() -> Console:
    """Return a console for tables; what is no terminal has no width that could cut them."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_COLUMNS)


def _read(file: Path, settings: list[str] | None, *, verbose: bool, default_level: str | None = None) -> ClusterConfig:
    config = read_config(file, settings=settings).config
    set_up_logging(default_level if default_level and not verbose else log_level(config, verbose=verbose))
    return config


def _next_commands(record: ClusterRecord, file: Path) -> list[str]:
    lines = []
    if record.token:
        lines.append(f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={record.token}")
    job = f"deepinfer run --cluster {file} -i $PWD/rows.jsonl -o $PWD/answers.jsonl"
    if record.dashboard_url:
        lines.append(f"ray job submit --address {record.dashboard_url} -- {job}")
        lines.append(f"# or without Ray's job queue: {job}")
    else:
        lines.append(job)
    return lines
