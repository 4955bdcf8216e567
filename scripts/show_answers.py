"""Print an output file of `deepinfer run` as a table: show_answers.py answers.jsonl"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def main() -> None:
    """Show one table row per output line, in the order of the input."""
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    table = Table("row", "finish", "prompt", "generated", "ranks", "answer", title=sys.argv[1], title_justify="left")
    for line in sorted(lines, key=lambda line: int(line["id"].rsplit("_", 1)[1])):
        table.add_row(str(line["custom_id"]), *_cells(line))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    if line["error"] is not None:
        return "[red]error[/red]", "", "", "", f"line {line['error']['line']}: {line['error']['message']}"
    body = line["response"]["body"]
    choice, usage, own = body["choices"][0], body["usage"], body["deepinfer"]
    message = choice.get("message")
    text = choice["text"] if message is None else message["content"] or f"(thinking) {message['reasoning_content']}"
    return (
        choice["finish_reason"],
        str(usage["prompt_tokens"]),
        str(usage["completion_tokens"]),
        f"{own['prefill_rank']} -> {own['decode_rank']}",
        repr(text[:40]).replace("[", "\\["),
    )


if __name__ == "__main__":
    main()
