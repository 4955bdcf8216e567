"""Where requests wait until their grammar is compiled; the others go past them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.errors import RequestError
from deepinfer.protocol import GrammarSpec, Request, RequestFailure
from deepinfer.structured_outputs.compiler import GrammarCompiler
from deepinfer.structured_outputs.grammar import RequestGrammar


@dataclass(slots=True)
class _Held:
    request: Request
    grammar: GrammarSpec
    indexes: set[int]
    enter: Callable[[RequestGrammar], None]


class GrammarGate:
    """Holds requests with a grammar. Only the step thread uses it; nothing here waits."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        """Start empty."""
        self._compiler = compiler
        self._held: list[_Held] = []

    @property
    def num_held(self) -> int:
        """Requests that wait here."""
        return len(self._held)

    def hold(self, request: Request, indexes: set[int], enter: Callable[[RequestGrammar], None]) -> None:
        """Keep `request` until `release` can call `enter` with its grammar.

        `indexes` are its sequences; those that are aborted meanwhile are taken out of this very set.
        """
        assert request.grammar is not None, request.request_id
        self._compiler.request(request.grammar)
        self._held.append(_Held(request, request.grammar, indexes, enter))

    def abort(self, indexes: set[int]) -> None:
        """Forget what is held of these sequences; a request whose sequences are all aborted is dropped."""
        for held in self._held:
            held.indexes -= indexes
        self._held = [held for held in self._held if held.indexes]

    def release(self) -> list[RequestFailure]:
        """Let requests in whose grammar is ready; return the failures of those that have none."""
        failures: list[RequestFailure] = []
        waiting: list[_Held] = []
        for held in self._held:
            compiled = self._compiler.look_up(held.grammar)
            if compiled is None:
                waiting.append(held)
            elif compiled.error is not None:
                failures += [_failure(held.request, index, compiled.error) for index in sorted(held.indexes)]
            else:
                assert compiled.grammar is not None, "neither a grammar nor an error"
                in_reasoning = held.request.output_format.in_reasoning
                held.enter(RequestGrammar(compiled.grammar, self._compiler.vocabulary, in_reasoning=in_reasoning))
        self._held = waiting
        return failures


def _failure(request: Request, index: int, error: RequestError) -> RequestFailure:
    return RequestFailure(request_id=request.request_id, index=index, kind=error.code, text=str(error))
