"""Whether a process still runs, as the package means it."""

from __future__ import annotations

import psutil


def runs(pid: int) -> bool:
    """False for one that has ended, also if its parent has not collected it yet: under load that can take long."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
