"""The command `deepinfer`: its subcommands, and how errors become messages and exit codes.

Exit codes: 0 done, 1 the engine failed, 2 usage or configuration (nothing was started), 3 the job ended with row errors
or the checkpoint has deviations, 130 interrupted.
"""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from deepinfer import __version__
from deepinfer.errors import ConfigError, DeepInferError, RequestError

EXIT_ENGINE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
# click's UsageError, which some versions of typer take from click and others from a copy of their own.
USAGE_ERRORS: tuple[type[Exception], ...] = typer.BadParameter.__bases__


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand: `module` has it under `attribute` (a function or an app); `summary` is its line of help."""

    name: str
    module: str
    attribute: str
    summary: str


# Loaded when asked for: some need torch and Ray, and help should not wait for them.
SUBCOMMANDS = (
    Subcommand("run", "deepinfer.cli.run", "run", "Answer the rows of a batch file; run it again to go on."),
    Subcommand("generate", "deepinfer.cli.generate", "generate", "Answer prompts and print the text as it comes."),
    Subcommand("doctor", "deepinfer.cli.doctor", "doctor", "Show what is on this machine and which settings hold."),
    Subcommand("checkpoint", "deepinfer.cli.checkpoint", "app", "Write or check checkpoints."),
    Subcommand("bench", "deepinfer.cli.bench", "app", "Measure steps of one rank, scheduling, or a whole job."),
)


def build_app(wanted: str | None) -> typer.Typer:
    """Return the command line with the subcommand `wanted` loaded and the others as lines of help."""
    app = typer.Typer(
        name="deepinfer",
        help=(
            "Offline inference of DeepSeek-V4.1-Flash on Ray.\n\n"
            "Example: deepinfer run -i in.jsonl -o out.jsonl --model tiny"
        ),
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_common)
    for subcommand in SUBCOMMANDS:
        if subcommand.name != wanted:
            app.command(subcommand.name, help=subcommand.summary)(_not_loaded)
            continue
        target = getattr(importlib.import_module(subcommand.module), subcommand.attribute)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=subcommand.name)
        else:
            app.command(subcommand.name)(target)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"deepinfer {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _not_loaded() -> None:
    raise AssertionError("the subcommand that was asked for is always loaded")


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGTERM, interrupt)
    code = run_command(sys.argv[1:])
    if sys.argv[1:2] == ["run"] and not sys.stderr.isatty():
        # Where a log is all that a user sees (`ray job submit` itself knows only 0 and 1), its last line says it.
        print(f"deepinfer: exit code {code}", file=sys.stderr, flush=True)
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Run `deepinfer` with `arguments` and return its exit code; see `run_app`."""
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    return run_app(lambda: build_app(wanted), arguments, name="deepinfer")


def run_app(make_app: Callable[[], typer.Typer], arguments: Sequence[str], *, name: str) -> int:
    """Run a command line and return its exit code; errors are told on stderr in one or two lines."""
    is_verbose = "-v" in arguments or "--verbose" in arguments
    try:
        return int(make_app()(list(arguments), prog_name=name, standalone_mode=False) or 0)
    except USAGE_ERRORS as error:
        _show(error)
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:  # the outermost loop: every failure has to end in a message
        if is_verbose:
            traceback.print_exc()
        print(f"{name}: {_message(error)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | RequestError) else EXIT_ENGINE


def _show(error: Any) -> None:
    """Print a usage error as click does, with the command's usage line."""
    error.show()


def _message(error: Exception) -> str:
    if isinstance(error, DeepInferError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}\nThis is a fault of deepinfer; -v shows where it happened."


def interrupt(_number: int, _frame: object) -> None:
    """Treat SIGTERM, which `ray job stop` and batch systems send, as Ctrl-C."""
    raise KeyboardInterrupt
