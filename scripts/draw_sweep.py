"""Print the points of `scripts/run_sweep.sh` and, where matplotlib is installed, draw them: draw_sweep.py FOLDER

Tokens per second and GPU reckon with the acceptance that each point was measured with. A user's speed is what one
sequence gets: tokens of a pass over the time of a step.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Point:
    """One measured setting; `rate` and `user_rate` in tokens per second."""

    requests: int
    context: int
    drafts: int
    seconds: float
    rate: float
    roof_share: float | None

    @property
    def user_rate(self) -> float:
        """What one sequence gets."""
        return self.rate / self.requests


def read_points(folder: Path) -> list[Point]:
    """Return the points of a folder, by context, drafts and requests."""
    points = [_point(json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("requests-*.json")]
    return sorted(points, key=lambda point: (point.context, point.drafts, point.requests))


def _point(content: dict[str, Any]) -> Point:
    seconds, roof = content["seconds"]["median"], content["roof_seconds"]
    return Point(
        requests=content["case"]["num_requests"],
        context=content["case"]["num_tokens"],
        drafts=content["config"]["speculative"]["max_draft_tokens"],
        seconds=seconds,
        rate=content["tokens_per_second"],
        roof_share=None if roof is None else roof[0] / seconds,
    )


def show(points: list[Point]) -> None:
    """Print the table."""
    table = Table(
        "context", "drafts", "requests", "ms a step", "tokens/s/GPU", "tokens/s/user", "of the roof", box=None
    )
    for point in points:
        share = "-" if point.roof_share is None else f"{100 * point.roof_share:.0f} %"
        table.add_row(
            f"{point.context:,}",
            str(point.drafts),
            str(point.requests),
            f"{1e3 * point.seconds:.2f}",
            f"{point.rate:,.0f}",
            f"{point.user_rate:.1f}",
            share,
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def draw(points: list[Point], target: Path) -> None:
    """Draw one line for each context and number of drafts: tokens/s/GPU against tokens/s/user."""
    from matplotlib.figure import Figure

    lines: dict[tuple[int, int], list[Point]] = defaultdict(list)
    for point in points:
        lines[point.context, point.drafts].append(point)
    figure = Figure(figsize=(8, 5))
    axes = figure.add_subplot()
    for (context, drafts), line in lines.items():
        x, y = [point.user_rate for point in line], [point.rate for point in line]
        axes.plot(x, y, marker="o", label=f"{context:,} tokens, {drafts} drafts")
    axes.set_xlabel("tokens/s of one sequence")
    axes.set_ylabel("tokens/s of one GPU")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(target, bbox_inches="tight")


def main() -> None:
    """Show and draw the folder named on the command line."""
    folder = Path(sys.argv[1])
    points = read_points(folder)
    if not points:
        sys.exit(f"{folder} holds no measured points")
    show(points)
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    draw(points, folder / "sweep.png")
    print(f"picture: {folder / 'sweep.png'}", file=sys.stderr)


if __name__ == "__main__":
    main()
