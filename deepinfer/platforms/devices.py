"""What accelerators and compilers this machine has, in words, for `deepinfer doctor`."""

from __future__ import annotations

import shutil
import subprocess

import torch

_SECONDS = 20.0
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def describe_devices() -> list[str]:
    """Return one line for each GPU that torch can use: name, compute capability, memory."""
    lines = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        lines.append(f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB")
    return lines


def describe_toolchain() -> dict[str, str]:
    """Return what kernels are built with and run on: the driver, torch's CUDA, and the compilers, "none" if absent.

    Triton needs a C compiler, DeepGEMM needs nvcc.
    """
    return {
        "NVIDIA driver": _first_line(_DRIVER),
        "CUDA of torch": torch.version.cuda or "none (a build for CPUs)",
        "nvcc": _last_line(("nvcc", "--version")),
        "C compiler": _first_line(("cc", "--version")),
    }


def _first_line(command: tuple[str, ...]) -> str:
    return _lines(command)[0]


def _last_line(command: tuple[str, ...]) -> str:
    return _lines(command)[-1]


def _lines(command: tuple[str, ...]) -> list[str]:
    """Return the lines that `command` prints, or one that says why there are none."""
    if shutil.which(command[0]) is None:
        return ["none"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]}: {error}"]
    words = done.stdout if done.returncode == 0 else f"{command[0]} fails: {done.stderr or done.stdout}"
    return [line.strip() for line in words.splitlines() if line.strip()] or [f"{command[0]} says nothing"]
