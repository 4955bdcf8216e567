"""What the device can do, measured in the same process as the steps: the ceilings of a roofline."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_REPEATS = 10
_SIDE = 8192
_COPY_VALUES = 1 << 28  # float32: 1 GiB read, 1 GiB written


@dataclass(slots=True, frozen=True)
class Ceilings:
    """`copy` bytes a second, read and written together; `bf16`, `fp8` operations a second of one large product."""

    copy: float
    bf16: float
    fp8: float


def measure_ceilings(device: torch.device) -> Ceilings | None:
    """Return the medians of ten tries each; None on a CPU, where nothing here is meant to be fast."""
    if device.type != "cuda":
        return None
    source = torch.randn(_COPY_VALUES, device=device)
    target = torch.empty_like(source)
    copy_seconds = _seconds(lambda: torch.neg(source, out=target))
    a, b = (torch.randn(_SIDE, _SIDE, device=device).to(torch.bfloat16) for _ in range(2))
    bf16_seconds = _seconds(lambda: a @ b)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    fp8_seconds = _seconds(
        lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16)  # noqa: SLF001  no public name
    )
    operations = 2.0 * _SIDE**3
    return Ceilings(8.0 * _COPY_VALUES / copy_seconds, operations / bf16_seconds, operations / fp8_seconds)


def _seconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)
