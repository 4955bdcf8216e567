"""The way of requests into a rank's scheduler: those with a grammar wait until it is compiled, others go past them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.codec import unpack
from deepinfer.errors import RequestError
from deepinfer.protocol import AdmittedRequest, Request, RequestFailure
from deepinfer.scheduler.step_scheduler import StepScheduler
from deepinfer.structured_outputs.compiler import Compilation, GrammarCompiler
from deepinfer.structured_outputs.grammar import RequestGrammar


@dataclass(slots=True)
class _Held:
    """`indexes`: the sequences of `request`; `aborted`: those that nobody wants any more."""

    request: Request
    compilation: Compilation
    indexes: set[int]
    aborted: set[int]
    enter: Callable[[RequestGrammar], None]


class GrammarGate:
    """Stands before a scheduler. Only the step thread uses it; nothing here waits."""

    def __init__(self, compiler: GrammarCompiler, scheduler: StepScheduler) -> None:
        """Start empty."""
        self._compiler = compiler
        self._scheduler = scheduler
        self._held: list[_Held] = []

    @property
    def num_held(self) -> int:
        """Requests that wait here."""
        return len(self._held)

    def add(self, request: Request) -> None:
        """`StepScheduler.add`, now or when the grammar is there."""
        if request.grammar is None:
            self._scheduler.add(request)
        else:
            self._hold(request, {request.index}, lambda grammar: self._scheduler.add(request, grammar))

    def admit(self, admitted: AdmittedRequest, buffer: object) -> None:
        """`StepScheduler.admit`, now or when the grammar is there."""
        request = admitted.request
        if request.grammar is None:
            self._scheduler.admit(admitted, buffer)
        else:
            indexes = {request.index + offset for offset in unpack(admitted.sample_offsets).tolist()}
            self._hold(request, indexes, lambda grammar: self._scheduler.admit(admitted, buffer, grammar))

    def abort(self, indexes: set[int]) -> None:
        """`StepScheduler.abort`, also for what is held."""
        for held in self._held:
            held.aborted |= held.indexes & indexes
        self._held = [held for held in self._held if held.indexes - held.aborted]
        self._scheduler.abort(indexes)

    def abort_all(self) -> None:
        """`StepScheduler.abort_all`, also for what is held."""
        self._held = []
        self._scheduler.abort_all()

    def release(self) -> list[RequestFailure]:
        """Let requests in whose grammar is ready; return the failures of those that have none."""
        failures: list[RequestFailure] = []
        waiting: list[_Held] = []
        for held in self._held:
            compiled = self._compiler.look_up(held.compilation)
            if compiled is None:
                waiting.append(held)
            elif compiled.error is not None:
                wanted = sorted(held.indexes - held.aborted)
                failures += [_failure(held.request, index, compiled.error) for index in wanted]
            else:
                assert compiled.grammar is not None, "neither a grammar nor an error"
                in_reasoning = held.request.output_format.in_reasoning
                held.enter(RequestGrammar(compiled.grammar, self._compiler.vocabulary, in_reasoning=in_reasoning))
                self._scheduler.abort(held.aborted)
        self._held = waiting
        return failures

    def _hold(self, request: Request, indexes: set[int], enter: Callable[[RequestGrammar], None]) -> None:
        assert request.grammar is not None, request.request_id
        compilation = self._compiler.request(request.grammar)
        self._held.append(_Held(request, compilation, indexes, set(), enter))


def _failure(request: Request, index: int, error: RequestError) -> RequestFailure:
    return RequestFailure(request_id=request.request_id, index=index, kind=error.code, text=str(error))
