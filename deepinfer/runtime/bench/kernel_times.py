"""Which kernels the device ran while an engine was working, by torch's profiler. Kernels inside graphs count too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(slots=True, frozen=True)
class KernelTime:
    """One kernel: how often it ran, and its time in all."""

    name: str
    count: int
    seconds: float


@dataclass(slots=True, frozen=True)
class KernelTimes:
    """`kernels` by falling time, over `wall_seconds`; `busy_seconds` of these some kernel or copy was running."""

    wall_seconds: float
    busy_seconds: float
    kernels: tuple[KernelTime, ...]


def watch_kernels(wait: Callable[[], None]) -> KernelTimes:
    """Record what runs on the GPU until `wait` returns: from the first kernel's begin to the last one's."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wait()
        torch.cuda.synchronize()
        time.sleep(0.05)
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    )
    if not spans:
        return KernelTimes(0.0, 0.0, ())
    totals: dict[str, tuple[int, float]] = {}
    for begin, end, name in spans[:-1]:
        count, seconds = totals.get(name, (0, 0.0))
        totals[name] = count + 1, seconds + (end - begin) / 1e6
    kernels = tuple(
        KernelTime(name, count, seconds)
        for name, (count, seconds) in sorted(totals.items(), key=lambda item: -item[1][1])
    )
    return KernelTimes((spans[-1][0] - spans[0][0]) / 1e6, _covered([span[:2] for span in spans[:-1]]) / 1e6, kernels)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of sorted spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
