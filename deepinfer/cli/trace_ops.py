"""What the operations of a Chrome trace took, each without those that it called."""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import dataclass

import msgspec

# Kinds of events in the traces of torch's profiler: operations of the host, and what runs on a CUDA device.
_HOST = "cpu_op"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(slots=True)
class OpTime:
    """One operation of the host, or one kernel of the device, summed over its calls."""

    name: str
    on_device: bool
    num_calls: int = 0
    seconds: float = 0.0


class _Event(msgspec.Struct):
    """An event of a trace; times in microseconds."""

    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 (the format's name)


def op_times(trace: bytes) -> list[OpTime]:
    """Return the operations of a gzipped Chrome trace, those of the device first, by descending time."""
    by_thread: defaultdict[int | str, list[_Event]] = defaultdict(list)
    ops: dict[tuple[bool, str], OpTime] = {}
    for event in msgspec.json.decode(gzip.decompress(trace), type=_Trace).traceEvents:
        if event.cat in _DEVICE:
            _count(ops, event, event.dur, on_device=True)
        elif event.cat == _HOST:
            by_thread[event.tid].append(event)
    for events in by_thread.values():
        for event, own in _own_times(events):
            _count(ops, event, own, on_device=False)
    return sorted(ops.values(), key=lambda op: (not op.on_device, -op.seconds))


def _count(ops: dict[tuple[bool, str], OpTime], event: _Event, micros: float, *, on_device: bool) -> None:
    op = ops.setdefault((on_device, event.name), OpTime(event.name, on_device))
    op.num_calls += 1
    op.seconds += micros * 1e-6


def _own_times(events: list[_Event]) -> list[tuple[_Event, float]]:
    """Return each event of one thread with its time minus that of the events right inside it."""
    own: list[tuple[_Event, float]] = []
    open_places: list[int] = []
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        while open_places and own[open_places[-1]][0].ts + own[open_places[-1]][0].dur <= event.ts:
            open_places.pop()
        if open_places:
            outer, seconds = own[open_places[-1]]
            own[open_places[-1]] = outer, seconds - event.dur
        open_places.append(len(own))
        own.append((event, event.dur))
    return own
