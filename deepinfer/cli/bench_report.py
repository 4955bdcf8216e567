"""What `deepinfer bench` prints and writes: times, rates, the roofline, memory, and the kernels that ran."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from deepinfer.models.deepseek_v41.step_costs import DRAFT, OpCost, roof_seconds, step_roof_seconds
from deepinfer.runtime.bench.bench_rank import BenchCase, BenchTimes
from deepinfer.runtime.bench.ceilings import Ceilings
from deepinfer.runtime.bench.kernel_kinds import COST_NAMES, kind_of
from deepinfer.runtime.bench.scheduling import DriverCost

_NOT_ON_CPU = "not measured on a CPU"
_MAX_KERNELS = 40
_MAX_NAME = 90


@dataclass(slots=True, frozen=True)
class Report:
    """`tokens`: what a pass is worth; `costs`: what it needs at the least. `step_tokens`: most tokens of a prompt that
    run in one step.
    """

    case: BenchCase
    num_layers: int
    tokens: float
    times: BenchTimes
    costs: list[OpCost]
    step_tokens: int

    @property
    def seconds(self) -> float:
        """The median pass, from one result to the next."""
        return statistics.median(self.times.period_seconds)

    @property
    def roof(self) -> tuple[float, float] | None:
        """Least seconds of a pass: products and copies at the same time, and every kind of work by itself."""
        if self.times.ceilings is None:
            return None
        rates, copy = matrix_rates(self.times.ceilings), self.times.ceilings.copy
        return step_roof_seconds(self.costs, rates, copy), sum(roof_seconds(cost, rates, copy) for cost in self.costs)


def matrix_rates(ceilings: Ceilings) -> dict[str, float]:
    """Return operations a second by the names that costs use."""
    return {"bf16": ceilings.bf16, "fp8": ceilings.fp8}


def report_json(report: Report) -> dict[str, Any]:
    """Return everything as plain values; times in seconds."""
    return {
        "case": asdict(report.case),
        "layers": report.num_layers,
        "seconds": {"median": report.seconds, **_spread(report.times.period_seconds)},
        "tokens_per_second": report.tokens / report.seconds,
        "roof_seconds": report.roof,
        "costs": [asdict(cost) for cost in report.costs],
        "idle_share": report.times.idle_share,
        "kinds": {"seconds": kind_seconds(report), "roof_seconds": kind_roofs(report)},
        **asdict(report.times),
    }


def print_report(report: Report, console: Console) -> None:
    """Print all tables."""
    tables = (_summary, _cost_table, _memory_table, _kind_table, _kernel_table)
    for table in (make(report) for make in tables):
        if table is not None:
            console.print(table)
    console.print(
        "Left out: the exchange between ranks, waiting for slower ranks, hand-overs of KV. Routing is balanced unless "
        "--skew says otherwise. Tokens per second reckon with the given acceptance; random weights accept "
        f"{report.times.tokens_per_pass:.2f} tokens a pass."
    )


def print_scheduling(
    step_seconds: float, cost: DriverCost, *, num_sequences: int, num_ranks: int, console: Console
) -> None:
    """Print what `deepinfer bench scheduler` measured, in CPU time of one core."""
    table = _table("scheduling, CPU time of one core", "", "")
    table.add_row(f"a decode rank's step, {num_sequences} sequences", f"{1e3 * step_seconds:.2f} ms")
    table.add_row(f"driver, {num_ranks} decode ranks: a request", f"{1e6 * cost.seconds / cost.num_requests:.0f} us")
    table.add_row("   a token", f"{1e6 * cost.seconds / cost.num_tokens:.2f} us")
    table.add_row(f"   a round, of {cost.num_rounds}", f"{1e3 * cost.seconds / cost.num_rounds:.1f} ms")
    table.add_row("   most that it can serve", f"{cost.num_tokens / cost.seconds:,.0f} tokens/s")
    console.print(table)


def _spread(seconds: tuple[float, ...]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {"p10": ordered[round(0.1 * last)], "p90": ordered[round(0.9 * last)]}


def _summary(report: Report) -> Table:
    case, times = report.case, report.times
    table = _table(f"{case.role}, one rank of {case.num_ranks}, {report.num_layers} layers", "", "")
    spread = _spread(times.period_seconds)
    unit = "step" if case.role == "decode" else "prompt"
    table.add_row("sequences" if case.role == "decode" else "prompts at once", f"{case.num_requests}")
    table.add_row("tokens of each", f"{case.num_tokens:,}")
    if case.role == "prefill":
        table.add_row("steps a prompt", f"{times.steps_per_pass}, of {report.step_tokens:,} tokens at the most")
    table.add_row(f"ms a {unit}, median", f"{1e3 * report.seconds:.2f}")
    table.add_row("   p10, p90", f"{1e3 * spread['p10']:.2f}, {1e3 * spread['p90']:.2f} of {case.num_steps}")
    table.add_row("   between device events", f"{1e3 * statistics.median(times.device_seconds):.2f}")
    table.add_row("tokens/s/GPU", f"{report.tokens / report.seconds:,.0f} ({report.tokens:,.0f} tokens a {unit})")
    table.add_row("device idle between steps", f"{100 * times.idle_share:.1f} %")
    if times.kernels is not None and times.kernels.wall_seconds:
        share = times.kernels.busy_seconds / times.kernels.wall_seconds
        table.add_row("some kernel runs (while watched)", f"{100 * share:.1f} % of the time")
    table.add_row("roofline, ms", _NOT_ON_CPU if report.roof is None else _roof_text(report.roof, report.seconds))
    if times.ceilings is not None:
        rates = times.ceilings
        text = f"{rates.copy / 1e12:.2f} TB/s, bf16 {rates.bf16 / 1e12:.0f}, fp8 {rates.fp8 / 1e12:.0f} TF"
        table.add_row("ceilings: copy, products", text)
    table.add_row("build, s", f"{times.build_seconds:.1f}")
    return table


def _roof_text(roof: tuple[float, float], seconds: float) -> str:
    at_once, in_turn = roof
    return (
        f"{1e3 * at_once:.2f} with everything at once ({100 * at_once / seconds:.0f} %), "
        f"{1e3 * in_turn:.2f} one after another ({100 * in_turn / seconds:.0f} %)"
    )


def _cost_table(report: Report) -> Table:
    ceilings = report.times.ceilings
    title = "least work of a pass" + ("" if ceilings else f"; roofs: {_NOT_ON_CPU}")
    table = _table(title, "kind", "TF", "GB", "products in", "roof ms")
    for cost in report.costs:
        roof = "-"
        if ceilings is not None:
            roof = f"{1e3 * roof_seconds(cost, matrix_rates(ceilings), ceilings.copy):.3f}"
        table.add_row(cost.name, f"{cost.operations / 1e12:.4g}", f"{cost.num_bytes / 1e9:.4g}", cost.rate, roof)
    return table


def _memory_table(report: Report) -> Table:
    memory = report.times.memory
    table = _table("memory of the process, GiB", "", "")
    for name, num_bytes in (
        ("weights", memory.weights),
        ("caches, tables, graphs", memory.with_caches - memory.weights),
        ("steps, at the most", max(0, memory.most - memory.with_caches)),
        ("of", memory.total),
    ):
        table.add_row(name, f"{num_bytes / 2**30:.1f}")
    return table


def kind_seconds(report: Report) -> dict[str, float]:
    """Return the kernels' seconds in a pass by kind of work, the longest first; empty where nothing was watched."""
    kernels = report.times.kernels
    if kernels is None or not kernels.wall_seconds:
        return {}
    passes = _num_watched(report)
    totals: dict[str, float] = {}
    for kernel in kernels.kernels:
        kind = kind_of(kernel.name)
        totals[kind] = totals.get(kind, 0.0) + kernel.seconds / passes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _num_watched(report: Report) -> float:
    """Return how many passes the profiler saw, though it may have begun in the middle of one."""
    kernels = report.times.kernels
    return 1.0 if kernels is None else kernels.num_steps / report.times.steps_per_pass


def kind_roofs(report: Report) -> dict[str, float]:
    """Return the least seconds of the kinds that the costs know, draft included; empty on a CPU."""
    ceilings = report.times.ceilings
    if ceilings is None:
        return {}
    rates = matrix_rates(ceilings)
    by_name: dict[str, float] = {}
    for cost in report.costs:
        name = cost.name.removeprefix(DRAFT)
        by_name[name] = by_name.get(name, 0.0) + roof_seconds(cost, rates, ceilings.copy)
    return {kind: sum(by_name.get(name, 0.0) for name in names) for kind, names in COST_NAMES.items()}


def _kind_table(report: Report) -> Table | None:
    seconds, roofs = kind_seconds(report), kind_roofs(report)
    if not seconds:
        return None
    table = _table("kernels of a pass by kind (told by their names), draft included", "kind", "ms", "roof ms", "of it")
    for kind, taken in seconds.items():
        roof = roofs.get(kind)
        known = ("-", "-") if roof is None else (f"{1e3 * roof:.3f}", f"{100 * roof / taken:.0f} %")
        table.add_row(kind, f"{1e3 * taken:.3f}", *known)
    table.add_row("all", f"{1e3 * sum(seconds.values()):.3f}", f"{1e3 * sum(roofs.values()):.3f}", "")
    return table


def _kernel_table(report: Report) -> Table | None:
    kernels = report.times.kernels
    if kernels is None or not kernels.kernels:
        return None
    passes = _num_watched(report)
    table = _table(f"kernels of a pass, by name, of {passes:g} passes", "ms", "calls", "us a call", "kernel")
    for kernel in kernels.kernels[:_MAX_KERNELS]:
        table.add_row(
            f"{1e3 * kernel.seconds / passes:.3f}",
            f"{kernel.count / passes:.1f}",
            f"{1e6 * kernel.seconds / kernel.count:.1f}",
            kernel.name[:_MAX_NAME],
        )
    others = kernels.kernels[_MAX_KERNELS:]
    seconds, count = sum(kernel.seconds for kernel in others), sum(kernel.count for kernel in others)
    table.add_row(f"{1e3 * seconds / passes:.3f}", f"{count / passes:.1f}", "", f"{len(others)} other kernels")
    every = sum(kernel.seconds for kernel in kernels.kernels)
    calls = sum(kernel.count for kernel in kernels.kernels)
    table.add_row(f"{1e3 * every / passes:.3f}", f"{calls / passes:.1f}", "", "all")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), show_header=any(columns))
    for column in columns:
        is_text = column in ("", "kind", "kernel", "products in")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column == "kernel")
    return table
