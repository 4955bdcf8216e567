"""Steps of a running engine, as its metrics tell of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer.errors import RequestError
from deepinfer.runtime.rank_engine import RankEngine


@dataclass(slots=True, frozen=True)
class Step:
    """A step whose results the host has read at `read_seconds` (`time.perf_counter()`).

    `device_seconds`: from its first to its last kernel, between events of the device.
    """

    read_seconds: float
    device_seconds: float


class StepLog:
    """A `metrics.Recorder` that keeps every step's time, and totals of the rest."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.totals: dict[str, float] = {}
        self.steps: list[Step] = []
        self._changed = threading.Condition()

    def add(self, name: str, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:  # noqa: ARG002
        """Add to a counter."""
        self.totals[name] = self.totals.get(name, 0.0) + value

    def set(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:  # noqa: ARG002
        """Set a gauge."""
        self.totals[name] = value

    def observe(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:  # noqa: ARG002
        """Note a step."""
        if name == "deepinfer_step_seconds":
            with self._changed:
                self.steps.append(Step(time.perf_counter(), value))
                self._changed.notify_all()

    def wait(self, count: int, engine: EngineThread) -> None:
        """Return when `count` steps have been read. Raises what broke the engine."""
        with self._changed:
            while len(self.steps) < count:
                self._changed.wait(timeout=0.1)
                engine.check()
                ended = bool(self.steps) and engine.engine.status()["parked"]
                assert not ended, f"the work ended after {len(self.steps)} steps, before step {count}"


class EngineThread:
    """Runs an engine's step thread; use as a context."""

    def __init__(self, engine: RankEngine) -> None:
        """Take the engine; nothing runs yet."""
        self.engine = engine
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bench-steps", daemon=True)

    def __enter__(self) -> EngineThread:
        self._thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.engine.stop()
        self._thread.join()

    def check(self) -> None:
        """Raise what ended the engine, or RequestError when a request has failed."""
        if self._error is not None:
            raise self._error
        results, _ = self.engine.take_results()
        if results is not None and results.failures:
            failure = results.failures[0]
            raise RequestError(f"request {failure.request_id} failed: {failure.text}", code=failure.kind)

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception as error:  # told to the thread that waits for steps
            self._error = error
