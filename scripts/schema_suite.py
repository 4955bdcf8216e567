"""Run the JSON Schema Test Suite through what guards structured output: schema check, grammar compiler and matcher.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite suite
    python scripts/schema_suite.py suite            # or any folder of files in the suite's format

Prints how many schemas are refused, and for which keywords; of those that are enforced, how many instances that the
suite calls valid or invalid the grammar takes, in whatever spelling (white space, order of properties, 1 or 1.0). Two
tables: the schemas as they stand, and those without a "type" again with the one that their keywords speak of (and with
declared properties, where names are demanded), since such a keyword is refused without its type; instances of other
types are left out then. `--list` shows each schema that is refused and each instance on which grammar and suite differ.

Valid instances that no grammar takes, all on purpose. Objects and arrays are closed: an answer has no property or item
that the schema does not describe. "properties", "items" and "required" without a type stand for objects or arrays. A
"pattern" is matched from end to end, and characters that JSON escapes never stand in its texts. A "format" is enforced,
which the suite's main part takes for a comment; leap seconds, lower-case letters in times, IPv4 tails of IPv6 addresses
and addresses of hosts in e-mail addresses are left out.

Exit codes: 0; 1 if an invalid instance was taken, or a schema that passed the check did not compile; 2 usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepinfer.errors import RequestError
from deepinfer.models.deepseek_v41 import tiny_tokenizer
from deepinfer.protocol import GrammarSpec
from deepinfer.schema_check import normalize_schema
from deepinfer.structured_outputs.compiler import GrammarCompiler
from deepinfer.structured_outputs.grammar import RequestGrammar
from deepinfer.structured_outputs.vocabulary import grammar_vocabulary
from deepinfer.tokenizer import Tokenizer

DRAFT = Path("tests/draft2020-12")
_KEYWORDS_OF_TYPE = {
    "integer": {"multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"minItems", "maxItems", "uniqueItems", "contains"},
    "object": {"required", "minProperties", "maxProperties", "patternProperties", "propertyNames", "dependentRequired"},
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
_POINTER = re.compile(r": at #(\S*): ")
_MAX_ORDERS = 24  # of the properties of one instance


@dataclass(frozen=True)
class Case:
    """One schema of the suite; `instances`: values and whether they are valid."""

    file: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]


@dataclass
class Outcome:
    """`counts`: of each file, by `COLUMNS`; `refused`: how often a keyword was; `remarks`: a line for each of them."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def total(self, column: str) -> int:
        """Sum over the files."""
        return sum(counts[column] for counts in self.counts.values())


COLUMNS = (
    "refused",
    "not compiled",
    "enforced",
    "valid accepted",
    "valid rejected",
    "invalid rejected",
    "invalid accepted",
)


class Enforcer:
    """Compiles schemas for the tiny vocabulary and follows texts through them, token by token."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._tokenizer = Tokenizer(tiny_tokenizer.tokenizer_json(), tiny_tokenizer.tokenizer_config_json(4096))
        self._vocabulary = grammar_vocabulary(self._tokenizer, vocab_size=self._tokenizer.vocab_size)
        self._compiler = GrammarCompiler(self._vocabulary)

    def compile(self, schema: Any) -> RequestGrammar:
        """Return the grammar of `schema`; raises RequestError if the check refuses it, RuntimeError if it breaks."""
        text = json.dumps(normalize_schema(schema, param="schema"), ensure_ascii=False)
        spec = GrammarSpec(kind="json", text=text)
        compilation = self._compiler.request(spec)
        while (compiled := self._compiler.look_up(compilation)) is None:
            time.sleep(0.001)
        if compiled.grammar is None:
            raise RuntimeError(str(compiled.error))
        return RequestGrammar(compiled.grammar, self._vocabulary)

    def takes(self, grammar: RequestGrammar, value: Any) -> bool:
        """Whether some spelling of `value` is a whole answer."""
        return any(self._takes_text(grammar, text) for text in spellings(value))

    def _takes_text(self, grammar: RequestGrammar, text: str) -> bool:
        token_ids = [*self._tokenizer.encode_text(text), self._tokenizer.eos_token_id]
        return grammar.begin(token_ids).failure is None


def spellings(value: Any) -> Iterator[str]:
    """Yield JSON texts of `value`: with white space and without, whole numbers with and without a point."""
    for form in _number_forms(value):
        for order in _orders(form):
            for separators in ((",", ":"), (", ", ": ")):
                yield json.dumps(order, ensure_ascii=False, separators=separators)


def _number_forms(value: Any) -> list[Any]:
    whole = _map_numbers(value, lambda number: int(number) if float(number).is_integer() else number)
    pointed = _map_numbers(value, lambda number: float(number) if abs(number) < 2**53 else number)
    return [value, whole, pointed]


def _map_numbers(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return change(value)
    if isinstance(value, list):
        return [_map_numbers(entry, change) for entry in value]
    if isinstance(value, dict):
        return {name: _map_numbers(entry, change) for name, entry in value.items()}
    return value


def _orders(value: Any) -> Iterator[Any]:
    """Yield `value` with the properties of its outermost object in different orders."""
    if not isinstance(value, dict):
        yield value
        return
    for order in itertools.islice(itertools.permutations(value.items()), _MAX_ORDERS):
        yield dict(order)


def read_cases(folder: Path) -> list[Case]:
    """Return the cases of all files in `folder`; raises OSError or ValueError for what is no suite."""
    cases = []
    for path in sorted(folder.rglob("*.json")):
        for case in json.loads(path.read_text()):
            instances = tuple((test["data"], test["valid"]) for test in case["tests"])
            cases.append(Case(str(path.relative_to(folder)), case["schema"], instances))
    return cases


def with_types(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield the cases whose schema has no type but a keyword of one, with that type and the instances of it."""
    for case in cases:
        if not isinstance(case.schema, dict) or "type" in case.schema:
            continue
        name = next((name for name, keywords in _KEYWORDS_OF_TYPE.items() if keywords & case.schema.keys()), None)
        if name is None:
            continue
        instances = tuple((value, valid) for value, valid in case.instances if _is_of_type(value, name))
        yield Case(case.file, _typed(case.schema, name), instances)


def _is_of_type(value: Any, name: str) -> bool:
    return isinstance(value, _PYTHON_TYPES[name]) and not isinstance(value, bool)


def _typed(schema: dict[str, Any], name: str) -> dict[str, Any]:
    typed = {**schema, "type": name}
    if name == "array":
        typed.setdefault("items", True)
    if "required" in schema:
        typed["properties"] = {**dict.fromkeys(schema["required"], True), **schema.get("properties", {})}
    if name == "object" and schema.keys() & {"minProperties", "maxProperties"}:
        typed.setdefault("properties", dict.fromkeys(("foo", "bar", "baz"), True))
    return typed


def run(cases: Iterable[Case], enforcer: Enforcer) -> Outcome:
    """Try every instance of every case."""
    outcome = Outcome()
    for case in cases:
        counts = outcome.counts.setdefault(case.file, Counter())
        shown = f"{case.file}: {json.dumps(case.schema)}"
        try:
            grammar = enforcer.compile(case.schema)
        except RequestError as error:
            counts["refused"] += 1
            outcome.refused[_keyword(error)] += 1
            outcome.remarks.append(f"refused: {shown}: {error}")
            continue
        except RuntimeError as error:
            counts["not compiled"] += 1
            outcome.remarks.append(f"not compiled: {shown}: {error}")
            continue
        counts["enforced"] += 1
        for value, valid in case.instances:
            taken = enforcer.takes(grammar, value)
            kind = f"{'valid' if valid else 'invalid'} {'accepted' if taken else 'rejected'}"
            counts[kind] += 1
            if taken != valid:
                outcome.remarks.append(f"{kind}: {shown}: {json.dumps(value)}")
    return outcome


def _keyword(error: RequestError) -> str:
    """The last name of the JSON pointer in a refusal: the keyword, unless a schema as a whole is at fault."""
    found = _POINTER.search(str(error))
    names = [name for name in found.group(1).split("/") if not name.isdigit()] if found else []
    return names[-1] if names and names[-1] else "(a whole schema)"


def show(console: Console, title: str, outcome: Outcome) -> None:
    """Print the pass table and the keywords of what was refused."""
    table = Table(title=title, title_justify="left")
    table.add_column("file")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for file, counts in outcome.counts.items():
        table.add_row(file, *(str(counts[column] or "") for column in COLUMNS))
    table.add_section()
    table.add_row("all", *(str(outcome.total(column)) for column in COLUMNS))
    console.print(table)
    listed = ", ".join(f"{name} {count}" for name, count in outcome.refused.most_common())
    console.print(f"refused at: {listed or 'nothing'}\n", soft_wrap=True, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="the suite's folder, or one of files in its format")
    parser.add_argument("--list", action="store_true", help="show refused schemas and differing instances")
    options = parser.parse_args(arguments)
    folder = options.path / DRAFT if (options.path / DRAFT).is_dir() else options.path
    console = Console()
    try:
        cases = read_cases(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{folder} holds no files in the suite's format ({type(error).__name__}: {error})")
    if not cases:
        parser.error(f"there is no *.json file in {folder}")
    enforcer = Enforcer()
    outcomes = {"as they stand": run(cases, enforcer), "with types added": run(with_types(cases), enforcer)}
    for title, outcome in outcomes.items():
        show(console, title, outcome)
        for remark in outcome.remarks if options.list else ():
            console.print(remark, soft_wrap=True, markup=False, highlight=False)
    faults = sum(outcome.total("invalid accepted") + outcome.total("not compiled") for outcome in outcomes.values())
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
