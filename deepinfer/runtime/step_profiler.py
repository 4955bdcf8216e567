"""A torch profile of a rank's next steps, taken while the rank works; nothing of it runs until one is asked for.

The profiler starts and stops on the device thread, between two steps, when the device is idle: it sees whole steps, and
every operation of the host that launches them. A fault of the profiler costs the profile and nothing else.
"""

from __future__ import annotations

import gzip
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepinfer.errors import DeepInferError
from deepinfer.platforms.platform import Stream
from deepinfer.protocol import StepProfile

# How long the step that is on its way, and the profiler's own books, may take after the wait.
_GRACE_SECONDS = 120.0
_COMPRESSION = 3


class StepProfiler:
    """`take` is for any thread. The step thread tells of its steps by `begin_step`, `end_step` and `pause`."""

    def __init__(self, stream: Stream) -> None:
        """Profile what is submitted to `stream`."""
        self._stream = stream
        self._lock = threading.Lock()
        self._order: _Order | None = None

    def take(self, num_steps: int, *, wait_seconds: float, with_host: bool = True) -> StepProfile | None:
        """Profile the next `num_steps` steps; fewer when the rank runs out of work or the time is over.

        `with_host` false: what runs on the GPU alone, which slows its launches less.
        None: no step ran within `wait_seconds`. Raises DeepInferError when another profile is being taken or the
        profiler fails.
        """
        order = _Order(num_steps, with_host=with_host)
        with self._lock:
            if self._order is not None:
                raise DeepInferError("another profile of this rank is being taken; wait for its end")
            self._order = order
        try:
            if not order.done.wait(wait_seconds):
                order.num_wanted = 0
                if order.num_begun:
                    order.done.wait(_GRACE_SECONDS)
        finally:
            self._order = None
        return order.profile()

    def begin_step(self, step_id: int) -> None:
        """A step is about to be submitted."""
        if (order := self._order) is not None:
            self._stream.submit(partial(order.begin_step, step_id))

    def end_step(self) -> None:
        """All of the last step has been submitted."""
        if (order := self._order) is not None:
            self._stream.submit(order.end_step)

    def pause(self) -> None:
        """The rank has no more work: what was profiled so far has to do."""
        if (order := self._order) is not None:
            self._stream.submit(order.stop)


class _Order:
    """One profile. Its steps run on the device thread; `done` is set when there is nothing more to wait for."""

    def __init__(self, num_wanted: int, *, with_host: bool) -> None:
        self.num_wanted = num_wanted
        self.num_begun = 0
        self.done = threading.Event()
        self._num_ended = 0
        self._activities = [torch.profiler.ProfilerActivity.CPU] if with_host else []
        if torch.cuda.is_available():
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: torch.profiler.profile | None = None
        self._label: Any = None
        self._failure: str | None = None
        self._begin_seconds = 0.0
        self._seconds = 0.0

    def begin_step(self, step_id: int) -> None:
        if self.done.is_set() or self.num_begun >= self.num_wanted:
            return
        self.num_begun += 1
        try:
            if self._profiler is None:
                _wait_for_device()
                profiler = torch.profiler.profile(activities=self._activities)
                profiler.start()
                self._profiler = profiler
                self._begin_seconds = time.monotonic()
            self._label = torch.profiler.record_function(f"step {step_id}")
            self._label.__enter__()
        except Exception as error:
            self._fail(error)

    def end_step(self) -> None:
        if self._label is None or self.done.is_set():
            return
        self._label.__exit__(None, None, None)
        self._label = None
        self._num_ended += 1
        if self._num_ended >= self.num_wanted:
            self.stop()

    def stop(self) -> None:
        if self._profiler is None or self.done.is_set():
            return
        try:
            _wait_for_device()
            self._profiler.stop()
            self._seconds = time.monotonic() - self._begin_seconds
        except Exception as error:
            self._fail(error)
        self.done.set()

    def profile(self) -> StepProfile | None:
        """Return what was recorded, once `done` is set or nothing more is awaited; any thread."""
        if self._failure is not None:
            raise DeepInferError(f"torch's profiler failed: {self._failure}")
        if self._profiler is None or not self.done.is_set():
            return None
        return StepProfile(
            num_steps=self._num_ended,
            seconds=self._seconds,
            trace=_chrome_trace(self._profiler),
        )

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self.done.set()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _chrome_trace(profiler: torch.profiler.profile) -> bytes:
    """Return the trace. Only compiled code touches each event: the step thread needs this process's interpreter."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-profile-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), _COMPRESSION)
