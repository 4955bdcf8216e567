"""The command `deepinfer`: its subcommands, and how errors become messages and exit codes.

Exit codes: 0 done, 1 the engine failed, 2 usage or configuration (nothing was started), 3 the job ended with row errors
or the checkpoint has deviations, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from deepinfer.cli import checkpoint, doctor, generate, run
from deepinfer.errors import ConfigError, DeepInferError, RequestError

EXIT_ENGINE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
# click's UsageError, which some versions of typer take from click and others from a copy of their own.
USAGE_ERRORS: tuple[type[Exception], ...] = typer.BadParameter.__bases__

app = typer.Typer(
    name="deepinfer",
    help="Offline inference of DeepSeek-V4.1-Flash on Ray.\n\nExample: deepinfer run -i in.jsonl -o out.jsonl -m tiny",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(run.run)
app.command()(generate.generate)
app.command()(doctor.doctor)
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run `deepinfer` with `arguments` and return its exit code; errors are told on stderr in one or two lines."""
    is_verbose = "-v" in arguments or "--verbose" in arguments
    try:
        return int(app(list(arguments), prog_name="deepinfer", standalone_mode=False) or 0)
    except USAGE_ERRORS as error:
        _show(error)
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:  # the outermost loop: every failure has to end in a message
        if is_verbose:
            traceback.print_exc()
        print(f"deepinfer: {_message(error)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | RequestError) else EXIT_ENGINE


def _show(error: Any) -> None:
    """Print a usage error as click does, with the command's usage line."""
    error.show()


def _message(error: Exception) -> str:
    if isinstance(error, DeepInferError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}\nThis is a fault of deepinfer; -v shows where it happened."


def _interrupt(_number: int, _frame: object) -> None:
    """Treat SIGTERM, which `ray job stop` and batch systems send, as Ctrl-C."""
    raise KeyboardInterrupt
