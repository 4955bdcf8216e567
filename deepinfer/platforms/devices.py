"""What accelerators this machine has, in words, for `deepinfer doctor`."""

from __future__ import annotations

import torch


def describe_devices() -> list[str]:
    """Return one line for each GPU that torch can use: name, compute capability, memory."""
    lines = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        lines.append(f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB")
    return lines
