"""`deepinfer checkpoint tiny` and `deepinfer checkpoint verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from deepinfer.cli.options import Verbose
from deepinfer.log import set_up_logging
from deepinfer.models.deepseek_v41.tiny import write_tiny
from deepinfer.models.deepseek_v41.verify import verify_checkpoint

EXIT_DEVIATIONS = 3

app = typer.Typer(
    help="Write or check checkpoints.\n\nExample: deepinfer checkpoint verify ./DeepSeek-V4.1-Flash",
    no_args_is_help=True,
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's directory.")]


@app.command()
def tiny(
    directory: Directory,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same bits.")] = 0,
    verbose: Verbose = False,
) -> None:
    """Write a small random checkpoint in the released format.

    Example: deepinfer checkpoint tiny ./tiny --seed 1
    """
    _log(verbose=verbose)
    write_tiny(directory, seed=seed)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"wrote {directory}: {size / 1e6:.1f} MB, seed {seed}")


@app.command()
def verify(directory: Directory, verbose: Verbose = False) -> None:
    """Check names, shapes, dtypes, scales, shards and tokenizer of a checkpoint, reading only its headers.

    Example: deepinfer checkpoint verify ./DeepSeek-V4.1-Flash
    """
    _log(verbose=verbose)
    deviations = verify_checkpoint(directory)
    for deviation in deviations:
        print(deviation)
    if deviations:
        plural = "s" if len(deviations) > 1 else ""
        print(f"{directory}: {len(deviations)} deviation{plural}", file=sys.stderr)
        raise typer.Exit(EXIT_DEVIATIONS)
    print(f"{directory}: no deviations")


def _log(*, verbose: bool) -> None:
    set_up_logging("debug" if verbose else "warning")
