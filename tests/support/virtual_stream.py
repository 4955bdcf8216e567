"""A device in virtual time: pieces run at once, but their begin and end follow a clock that nothing else moves.

With it the engine's own loop shows exactly which host time is hidden behind device time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.fake_model import FakeModel

from deepinfer.models.model_spec import ForwardInputs, ForwardOutput


class VirtualClock:
    """`now` is the host's time in seconds; `spent` is the device time of the piece that runs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.spent = 0.0


class VirtualPiece:
    """See `platform.Piece`; waiting for it moves the host's time to its end."""

    def __init__(self, clock: VirtualClock, value: Any, begin_seconds: float, end_seconds: float) -> None:
        self._clock = clock
        self._value = value
        self.begin_seconds = begin_seconds
        self.end_seconds = end_seconds

    def done(self) -> bool:
        return self.end_seconds <= self._clock.now

    def result(self) -> Any:
        self._clock.now = max(self._clock.now, self.end_seconds)
        return self._value


class VirtualStream:
    """See `platform.Stream`."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._free_at = 0.0

    def submit(self, work: Callable[[], Any]) -> VirtualPiece:
        self._clock.spent = 0.0
        value = work()
        begin = max(self._clock.now, self._free_at)
        self._free_at = begin + self._clock.spent
        return VirtualPiece(self._clock, value, begin, self._free_at)

    def close(self) -> None:
        pass


class VirtualModel(FakeModel):
    """The fake model, each step taking `device_seconds` of virtual time."""

    def __init__(self, clock: VirtualClock, device_seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._device_seconds = device_seconds

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        self._clock.spent += self._device_seconds
        return super().forward(inputs)
