"""Compilation off the step's thread: the cache, the errors and the limit of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from grammar_case import json_spec, regex_spec, vocabulary

from deepinfer.protocol import GrammarSpec
from deepinfer.structured_outputs import compiler as module
from deepinfer.structured_outputs.compiler import CompiledGrammar, GrammarCompiler

SPEC = json_spec({"type": "boolean"})


class Waiting:
    """A compiler that one can wait for."""

    def __init__(self) -> None:
        self.compiler = GrammarCompiler(vocabulary())

    def result(self, spec: GrammarSpec) -> CompiledGrammar:
        compilation = self.compiler.request(spec)
        while (found := self.compiler.look_up(compilation)) is None:
            time.sleep(0.001)
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[GrammarSpec]:
    """Specifications in the order in which their compilation began."""
    begun: list[GrammarSpec] = []
    build: Callable[..., Any] = module.build_grammar
    monkeypatch.setattr(
        module, "build_grammar", lambda spec, **options: (begun.append(spec), build(spec, **options))[1]
    )
    return begun


def test_a_specification_is_compiled_once(calls: list[GrammarSpec]) -> None:
    waiting = Waiting()
    assert waiting.result(SPEC) is waiting.result(SPEC)
    assert waiting.result(SPEC).error is None
    assert calls == [SPEC]


def test_the_longest_unused_one_is_forgotten(calls: list[GrammarSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    waiting, (first, second, third) = Waiting(), [regex_spec(text) for text in "abc"]
    for spec in (first, second, first, third, first, second):
        waiting.result(spec)
    assert calls == [first, second, third, second]


def test_results_wait_for_those_who_asked_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """More grammars than are kept, compiled while a long step runs: none of them may be lost."""
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    waiting = Waiting()
    asked = [waiting.compiler.request(regex_spec(text)) for text in "abcdefab"]
    waiting.result(regex_spec("z"))  # begun last, so the others have ended, or nearly
    deadline = time.monotonic() + 60
    while any(waiting.compiler.look_up(compilation) is None for compilation in asked):
        assert time.monotonic() < deadline, "a result is lost"
        time.sleep(0.001)
    assert all(compilation.compiled and compilation.compiled.grammar for compilation in asked)


@pytest.mark.parametrize(
    "text", ["root ::= undefined", "nothing", 'other ::= "a"', "root ::= (", "root ::= " + "(" * 5000]
)
def test_what_can_not_be_compiled_is_an_error_of_its_own(text: str) -> None:
    waiting = Waiting()
    result = waiting.result(GrammarSpec(kind="ebnf", text=text))
    assert result.grammar is None
    assert result.error is not None
    assert result.error.code == "invalid_grammar"
    assert "/project/" not in str(result.error)
    assert waiting.result(SPEC).grammar is not None


def test_one_that_takes_too_long_is_given_up_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    build = module.build_grammar
    slow = [regex_spec("s" * size) for size in range(1, 4)]

    def build_slowly(spec: GrammarSpec, **options: Any) -> Any:
        if spec in slow:
            assert release.wait(60)
        return build(spec, **options)

    monkeypatch.setattr(module, "build_grammar", build_slowly)
    compiler = GrammarCompiler(vocabulary(), max_seconds=0.0)
    for compilation in [compiler.request(spec) for spec in slow]:  # two threads: the third waits for the others
        while (found := compiler.look_up(compilation)) is None:
            pass
        assert found.error is not None
        assert found.error.code == "grammar_timeout"
    release.set()
