"""Compiles grammars on threads of their own, keeps them, and gives up on those that take too long."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

import xgrammar

from deepinfer.errors import RequestError
from deepinfer.protocol import GrammarSpec
from deepinfer.structured_outputs.languages import build_grammar
from deepinfer.structured_outputs.vocabulary import GrammarVocabulary

MAX_KEPT = 256
MAX_THREADS = 2
MAX_SECONDS = 10.0
_MAX_LOST = 8


@dataclass(slots=True, frozen=True)
class CompiledGrammar:
    """A grammar ready for any number of sequences, or why there is none."""

    grammar: xgrammar.CompiledGrammar | None
    error: RequestError | None = None


@dataclass(slots=True, eq=False)
class Compilation:
    """One specification's way through the compiler; `compiled` is set once and stays."""

    spec: GrammarSpec
    begin_seconds: float = 0.0
    compiled: CompiledGrammar | None = None


class GrammarCompiler:
    """All grammars of a rank, by specification. `request` and `look_up` never wait; one thread may call them.

    Whoever holds a `Compilation` gets its result, however many others end before it is looked at; only those that
    nobody holds any more live in the cache alone. The engine compiles without Python's lock, so a step goes on beside
    it. A compilation can't be stopped: one that is given up goes on in its thread, which no longer counts; when
    `_MAX_LOST` of them are lost nothing new is compiled.
    """

    def __init__(self, vocabulary: GrammarVocabulary, *, max_seconds: float = MAX_SECONDS) -> None:
        """Start no thread yet."""
        self.vocabulary = vocabulary
        self._max_seconds = max_seconds
        self._engine = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
        self._lock = threading.Lock()
        self._open: dict[GrammarSpec, Compilation] = {}  # waiting or running
        self._waiting: deque[Compilation] = deque()
        self._running: list[Compilation] = []
        self._done: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._num_lost = 0

    def request(self, spec: GrammarSpec) -> Compilation:
        """Return the compilation of `spec`, a new one unless it is known or under way."""
        with self._lock:
            known = self._open.get(spec) or self._done.get(spec)
            if known is None:
                known = self._open[spec] = Compilation(spec)
                self._waiting.append(known)
                self._start_threads()
            elif known.compiled is not None:
                self._done.move_to_end(spec)
            return known

    def look_up(self, compilation: Compilation) -> CompiledGrammar | None:
        """Return what became of it, None while it is under way; late ones are given up here."""
        with self._lock:
            self._give_up_late_ones()
            return compilation.compiled

    def _start_threads(self) -> None:
        while self._waiting and len(self._running) < MAX_THREADS:
            job = self._waiting.popleft()
            if self._num_lost >= _MAX_LOST:
                self._keep(job, CompiledGrammar(None, _too_late("too many grammars before it never ended")))
                continue
            job.begin_seconds = time.monotonic()
            self._running.append(job)
            threading.Thread(target=self._compile, args=(job,), name="grammar", daemon=True).start()

    def _compile(self, job: Compilation) -> None:
        try:
            grammar = build_grammar(job.spec, dsml_id=self.vocabulary.dsml_id)
            compiled = CompiledGrammar(self._engine.compile_grammar(grammar))
        except RequestError as error:
            compiled = CompiledGrammar(None, error)
        except Exception as error:  # whatever the engine raises belongs to this one request
            text = f"the grammar can't be compiled ({type(error).__name__}: {error})"
            compiled = CompiledGrammar(None, RequestError(text, code="invalid_grammar"))
        with self._lock:
            if job in self._running:
                self._running.remove(job)
                self._keep(job, compiled)
                self._start_threads()
            else:
                self._num_lost -= 1  # it was given up, and its thread is free after all

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        late = [job for job in self._running if now - job.begin_seconds > self._max_seconds]
        for job in late:
            self._running.remove(job)
            self._num_lost += 1
            text = f"it took more than {self._max_seconds:g} seconds; simplify it"
            self._keep(job, CompiledGrammar(None, _too_late(text)))
        self._start_threads()

    def _keep(self, job: Compilation, compiled: CompiledGrammar) -> None:
        job.compiled = compiled
        del self._open[job.spec]
        self._done[job.spec] = job
        while len(self._done) > MAX_KEPT:
            self._done.popitem(last=False)


def _too_late(reason: str) -> RequestError:
    return RequestError(f"the grammar was not compiled: {reason}", code="grammar_timeout")
