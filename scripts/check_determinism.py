"""Check that an answer does not depend on what runs beside it: check_determinism.py --model tiny

Answers one set of prompts alone, together, in another order, in a crowd and, where drafts are configured, on a second
engine without them. Compares token ids and the bits of every log-probability. The engine runs in batch-invariant mode;
`--set determinism.batch_invariant=false` shows what happens without it.

Exit codes: 0 all bits equal, 3 some differ, 1 the engine failed, 2 usage or configuration.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from deepinfer.errors import ConfigError, DeepInferError
from deepinfer.llm import LLM, RequestOutput, SamplingParams

MAX_WORDS = 300  # of a made-up prompt: beyond the window and the kept suffix of the released model


@dataclass(frozen=True)
class Answer:
    """One row's tokens, and per token its log-probabilities (token id, value), the chosen token first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part. `what`: token, logprob or length."""

    row: int
    position: int
    what: str


@dataclass(frozen=True)
class Verdict:
    """One run against the first one."""

    run: str
    num_rows: int
    num_different: int
    first: Difference | None


def make_prompts(count: int, seed: int) -> list[str]:
    """Return made-up prompts of 1 to `MAX_WORDS` words, short ones more often."""
    numbers = random.Random(seed)
    lengths = [int(MAX_WORDS ** numbers.random()) for _ in range(count)]
    return [" ".join(_word(numbers) for _ in range(length)) for length in lengths]


def _word(numbers: random.Random) -> str:
    return "".join(numbers.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(numbers.randrange(1, 9)))


def first_difference(expected: Sequence[Answer], found: Sequence[Answer]) -> tuple[int, Difference | None]:
    """Return how many rows differ, and the first place in the first of them."""
    places = [
        Difference(row, *place)
        for row, (left, right) in enumerate(zip(expected, found, strict=True))
        if (place := _parting(left, right)) is not None
    ]
    return len(places), places[0] if places else None


def _parting(left: Answer, right: Answer) -> tuple[int, str] | None:
    for position, (one, other) in enumerate(zip(left.token_ids, right.token_ids, strict=False)):
        if one != other:
            return position, "token"
        if left.logprobs[position] != right.logprobs[position]:
            return position, "logprob"
    shorter = min(len(left.token_ids), len(right.token_ids))
    return None if len(left.token_ids) == len(right.token_ids) else (shorter, "length")


class Checker:
    """The rows of a check and how they are sampled: every second one greedily, each with a seed of its own."""

    def __init__(self, prompts: Sequence[str], *, max_tokens: int, seed: int) -> None:
        self.prompts, self.seed = prompts, seed
        self.params = [
            SamplingParams(max_tokens=max_tokens, temperature=float(row % 2), seq_seed=seed + row, logprobs=4)
            for row in range(len(prompts))
        ]

    def answer(self, llm: LLM, order: Sequence[int], *, max_in_flight: int | None = None) -> list[Answer]:
        """Answer all rows, sent in `order`; numbers from the number of rows on are company that nobody looks at."""
        count, found = len(self.prompts), dict[int, Answer]()
        company = make_prompts(sum(row >= count for row in order), self.seed + 1)
        rows = [self._row(row, company[row - count] if row >= count else self.prompts[row]) for row in order]
        for output in llm.generate_iter(rows, max_in_flight=max_in_flight):
            if output.error is not None:
                raise SystemExit(f"row {output.tag} failed, so nothing can be compared: {output.error}")
            found[output.tag] = _answer(output)
        return [found[row] for row in range(count)]

    def _row(self, row: int, prompt: str) -> Mapping[str, Any]:
        company = SamplingParams(max_tokens=1 + row % 8, seq_seed=row)
        return {"tag": row, "prompt": prompt, "params": self.params[row] if row < len(self.params) else company}

    def runs(self, llm: LLM) -> dict[str, list[Answer]]:
        """Answer the set alone, together, in another order and in a crowd three times its size."""
        count = len(self.prompts)
        shuffled, crowd = list(range(count)), list(range(4 * count))
        numbers = random.Random(self.seed)
        numbers.shuffle(shuffled)
        numbers.shuffle(crowd)
        return {
            "alone": self.answer(llm, range(count), max_in_flight=1),
            "together": self.answer(llm, range(count)),
            "shuffled": self.answer(llm, shuffled),
            "in a crowd": self.answer(llm, crowd),
        }


def _answer(output: RequestOutput) -> Answer:
    sequence = output.outputs[0]
    columns = sequence.logprobs or []
    return Answer(tuple(sequence.token_ids), tuple(tuple(column.items()) for column in columns))


def check(checker: Checker, model: str | None, cluster: str | None, settings: Mapping[str, object]) -> list[Verdict]:
    """Start the engine, or two of them, one after the other, and compare all runs with the first."""
    with LLM(model, cluster, settings=settings) as llm:
        found = checker.runs(llm)
        uses_drafts = llm.config.speculative.max_draft_tokens > 0
    if uses_drafts:
        without = {**settings, "speculative.max_draft_tokens": 0, "speculative.varlen": False}
        with LLM(model, cluster, settings=without) as llm:
            found["without drafts"] = checker.answer(llm, range(len(checker.prompts)))
    expected = found["alone"]
    return [
        Verdict(run, len(answers), *first_difference(expected, answers))
        for run, answers in found.items()
        if run != "alone"
    ]


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print one line for each run and the verdict."""
    table = Table("run", "rows", "different", "first difference", title="compared with each row alone")
    for verdict in verdicts:
        first = verdict.first
        place = "" if first is None else f"row {first.row}, position {first.position}: {first.what}"
        table.add_row(verdict.run, str(verdict.num_rows), str(verdict.num_different), place)
    console.print(table)
    is_same = not any(verdict.num_different for verdict in verdicts)
    console.print("deterministic: all bits are equal" if is_same else "NOT deterministic", style="bold")


def main() -> int:
    """Run the check; returns the exit code."""
    arguments = _arguments()
    prompts = make_prompts(arguments.rows, arguments.seed) if arguments.input is None else arguments.input
    settings: dict[str, object] = {"determinism.batch_invariant": True}
    for setting in arguments.set:
        path, _, value = setting.partition("=")
        settings[path] = yaml.safe_load(value)
    checker = Checker(prompts, max_tokens=arguments.max_tokens, seed=arguments.seed)
    try:
        verdicts = check(checker, arguments.model, arguments.cluster, settings)
    except DeepInferError as error:
        print(f"check_determinism: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    show(verdicts, Console(width=None if sys.stdout.isatty() else 120))
    return 3 if any(verdict.num_different for verdict in verdicts) else 0


def _read_prompts(path: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"can't read {path}: {error}") from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as for deepinfer run")
    parser.add_argument("--cluster", metavar="FILE", help="YAML file of the engine to check; default: this machine")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any config field")
    parser.add_argument("-i", "--input", type=_read_prompts, metavar="FILE", help="text file, one prompt a line")
    parser.add_argument("--rows", type=int, default=24, help="made-up prompts without -i (24)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of each answer (32)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, order and sampling (0)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
