"""Tables that `deepinfer-cluster` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from deepinfer.cli.trace_ops import op_times
from deepinfer.launcher.memory import RoleMemory
from deepinfer.protocol import StepProfile

# Rows of a profile's table, for the device and for the host, and how wide a kernel's name may become.
_MAX_OPS = 12
_MAX_NAME = 48


def memory_table(roles: Sequence[RoleMemory]) -> Table:
    """Return the memory of one rank of each role, by part, in GiB."""
    table = Table(title="memory of a rank, GiB", title_justify="left", box=None, padding=(0, 1))
    table.add_column("")
    for memory in roles:
        table.add_column(f"{memory.role} ({memory.num_ranks} ranks)", justify="right")
    for part in dict.fromkeys(part for memory in roles for part in memory.weights):
        table.add_row(part, *(_gib(memory.weights.get(part, 0)) for memory in roles))
    if any(memory.exchange_bytes for memory in roles):
        table.add_row("exchange within a host", *(_gib(memory.exchange_bytes) for memory in roles))
    if any(memory.handover_bytes for memory in roles):
        table.add_row("hand-overs within a host", *(_gib(memory.handover_bytes) for memory in roles))
    table.add_row("cache", *(_gib(memory.cache_bytes) for memory in roles))
    table.add_row("needed", *(_gib(memory.needed_bytes) for memory in roles))
    table.add_row("device", *(_gib(memory.device_bytes) for memory in roles))
    table.add_row("left for steps", *(_gib(memory.left_bytes) for memory in roles))
    if any(memory.host_table_bytes for memory in roles):
        table.add_row("n-gram tables, host, once a node", *(_gib(memory.host_table_bytes) for memory in roles))
    table.add_row("cache holds, tokens", *(f"{memory.num_tokens:,}" for memory in roles))
    if any(memory.recast_bytes for memory in roles):
        table.add_row("more if DeepGEMM recasts experts (Hopper)", *(_gib(memory.recast_bytes) for memory in roles))
    return table


def rank_table(numbers: dict[str, Any]) -> Table:
    """Return what `status` knows of every rank; running, waiting and what follows are as old as `reported` says."""
    table = Table(box=None, padding=(0, 1))
    has_domains = any("domain" in rank for rank in numbers["ranks"].values())
    texts = ("node", "domain", "device") if has_domains else ("node", "device")
    for name in ("rank", *texts, "pid", "loads", "running", "waiting", "step", "seconds", "idle", "reported"):
        is_text = name in ("rank", *texts)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for name, rank in numbers["ranks"].items():
        load = numbers["loads"].get(name, {})
        table.add_row(
            name,
            *(rank.get(text, "") for text in texts),
            str(rank["pid"]),
            str(rank["num_loads"]),
            str(load.get("num_running", 0)),
            str(load.get("num_waiting", 0)),
            str(load.get("step_id", 0)),
            f"{load.get('step_seconds', 0.0):.4f}",
            f"{load.get('device_idle_share', 0.0):.2f}",
            f"{load['age_seconds']:.0f} s ago" if load else "not yet",
        )
    return table


def op_table(rank: str, profile: StepProfile) -> Table:
    """Return the operations that took a rank most time, on the device and on the host, in milliseconds a step."""
    table = Table(
        title=f"{rank}: {profile.num_steps} steps in {profile.seconds:.3f} s",
        title_justify="left",
        box=None,
        padding=(0, 1),
    )
    for name in ("operation", "where", "calls a step", "ms a step", "share"):
        table.add_column(name, justify="left" if name in ("operation", "where") else "right", no_wrap=True)
    times = op_times(profile.trace)
    for where in ("device", "host"):
        ops = [op for op in times if op.on_device == (where == "device")]
        total = sum(op.seconds for op in ops)
        for op in ops[:_MAX_OPS]:
            table.add_row(
                op.name if len(op.name) <= _MAX_NAME else f"{op.name[: _MAX_NAME - 3]}...",
                where,
                f"{op.num_calls / profile.num_steps:.1f}",
                f"{1000 * op.seconds / profile.num_steps:.3f}",
                f"{op.seconds / total:.0%}",
            )
    return table


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.2f}"
