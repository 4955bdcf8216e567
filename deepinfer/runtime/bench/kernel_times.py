"""Which kernels the device ran in the steps of a profile. Kernels inside graphs count too."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass

from deepinfer.protocol import StepProfile

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # as a Chrome trace calls them


@dataclass(slots=True, frozen=True)
class KernelTime:
    """One kernel or kind of copy: how often it ran, and its time in all."""

    name: str
    count: int
    seconds: float


@dataclass(slots=True, frozen=True)
class KernelTimes:
    """`kernels` of `num_steps` whole steps by falling time, over `wall_seconds` from the first one's begin to the last
    one's end; `busy_seconds` of these some kernel or copy was running.
    """

    num_steps: int
    wall_seconds: float
    busy_seconds: float
    kernels: tuple[KernelTime, ...]


def kernel_times(profile: StepProfile) -> KernelTimes:
    """Add up what ran on the device, by name."""
    events = [event for event in json.loads(gzip.decompress(profile.trace))["traceEvents"] if _is_on_device(event)]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
    if not spans:
        return KernelTimes(profile.num_steps, 0.0, 0.0, ())
    totals: dict[str, tuple[int, float]] = {}
    for event in events:
        count, seconds = totals.get(event["name"], (0, 0.0))
        totals[event["name"]] = count + 1, seconds + event["dur"] / 1e6
    kernels = tuple(
        KernelTime(name, count, seconds)
        for name, (count, seconds) in sorted(totals.items(), key=lambda item: -item[1][1])
    )
    wall = max(end for _, end in spans) - spans[0][0]
    return KernelTimes(profile.num_steps, wall / 1e6, _covered(spans) / 1e6, kernels)


def _is_on_device(event: dict[str, object]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in _ON_DEVICE


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of sorted spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
