"""Time every op of a rank's kernel set on one GPU at the released shapes, against what the chip can do.

    python scripts/bench_kernels.py [--rows 256 1024 4096] [--context 131072] [--ops rms_norm ...] [--batch-invariant]

Decode of 256 (64) requests with three drafts each has 1024 (256) rows; prefill is given with as many rows as its chunk.
Each op is captured in a graph and replayed with a cold L2 cache; the figure is the median. "roof" is the larger of
(bytes that must move / copy rate) and (operations / matrix rate), both rates measured in the same run; "share" is roof
over time. Rows of one request see the same keys. Prints one table and, with --json, writes one file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.ops import Activations, CandidateRule, ExpertRows, ExpertSum, PagedRows
from deepinfer.kernels.registry import KernelSet, load_backend, select_kernels
from deepinfer.platforms.platform import load_platform

HIDDEN, HEADS, HEAD_DIM, ROTARY = 5120, 64, 512, 64
QUERY_RANK, GROUPS, GROUP_WIDTH, OUT_RANK = 1280, 8, 4096, 1024
EXPERTS, CHOSEN, EXPERT_WIDTH, LOCAL_EXPERTS = 384, 6, 2304, 6
PREFILL_EXPERTS, MAX_KEPT_ROWS = 96, 560
WINDOW, SELECTED, INDEX_HEADS, INDEX_DIM = 128, 512, 32, 128
VOCABULARY, BLOCK, ROWS_PER_REQUEST = 129280, 64, 4
REPEATS = 15


@dataclass(slots=True, frozen=True)
class Case:
    """One op at one size: `run` does it once; `num_bytes` and `operations` are the least it needs.

    `rate`: which matrix rate bounds it, "bf16" or "fp8".
    """

    name: str
    run: Callable[[], Any]
    num_bytes: float
    operations: float = 0.0
    rate: str = "bf16"


@dataclass(slots=True, frozen=True)
class Result:
    """One line of the table; times in microseconds."""

    rows: int
    name: str
    backend: str
    microseconds: float
    roof_microseconds: float


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Random values on the GPU."""
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def quantised(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A released FP8 matrix."""
    codes = normal(rows, columns, scale=100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, torch.randint(112, 116, (rows // 32, columns // 32), device="cuda", dtype=torch.uint8)


def time_graph(run: Callable[[], Any], flush: Tensor) -> float:
    """Median microseconds of a graph of one call, the L2 cache overwritten before each replay."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def ceilings(flush: Tensor) -> dict[str, float]:
    """Bytes per microsecond of reading and writing as much, operations per microsecond of large products."""
    source = normal(1 << 29, dtype=torch.float32)
    target = torch.empty_like(source)
    copy = 8 * len(source) / time_graph(lambda: torch.neg(source, out=target), flush)
    a, b = normal(8192, 8192), normal(8192, 8192)
    bf16 = 2 * 8192**3 / time_graph(lambda: a @ b, flush)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    product = lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731, SLF001
    return {"copy": copy, "bf16": bf16, "fp8": 2 * 8192**3 / time_graph(product, flush)}


def linear_cases(kernels: KernelSet, rows: int) -> Iterator[Case]:
    """Products of one layer."""
    for name, n, k in (
        ("wq_a", QUERY_RANK, HIDDEN),
        ("wq_b", HEADS * HEAD_DIM, QUERY_RANK),
        ("wkv", HEAD_DIM, HIDDEN),
        ("wo_b", HIDDEN, GROUPS * OUT_RANK),
        ("shared up", EXPERT_WIDTH, HIDDEN),
    ):
        x, weight = normal(rows, k), kernels.quantized_linear.prepare(*quantised(n, k))
        yield Case(
            f"quantized_linear {name} {k}->{n}",
            lambda x=x, weight=weight: kernels.quantized_linear(x, weight),
            n * k + 2 * rows * (n + k),
            2.0 * rows * n * k,
            "fp8",
        )
    both, down = normal(rows, 2 * EXPERT_WIDTH), kernels.quantized_linear.prepare(*quantised(HIDDEN, EXPERT_WIDTH))
    yield Case(
        f"quantized_linear shared down after swiglu {EXPERT_WIDTH}->{HIDDEN}",
        lambda: kernels.quantized_linear.after_swiglu(both, down, limit=10.0),
        HIDDEN * EXPERT_WIDTH + 2 * rows * (HIDDEN + 2 * EXPERT_WIDTH),
        2.0 * rows * HIDDEN * EXPERT_WIDTH,
        "fp8",
    )
    x = normal(rows, GROUPS, GROUP_WIDTH)
    grouped = kernels.grouped_linear.prepare(*quantised(GROUPS * OUT_RANK, GROUP_WIDTH), num_groups=GROUPS)
    size = GROUPS * OUT_RANK * GROUP_WIDTH
    moved = 2 * (size + x.numel() + rows * GROUPS * OUT_RANK)
    yield Case("grouped_linear wo_a", lambda: kernels.grouped_linear(x, grouped), moved, 2.0 * rows * size)
    hidden = normal(rows, HIDDEN)
    compressor = kernels.linear.prepare(normal(HEAD_DIM, HIDDEN))
    yield Case(
        f"linear compressor {HIDDEN}->{HEAD_DIM}",
        lambda: kernels.linear(hidden, compressor, out_dtype=torch.float32),
        2 * HEAD_DIM * HIDDEN + 2 * rows * HIDDEN + 4 * rows * HEAD_DIM,
        2.0 * rows * HEAD_DIM * HIDDEN,
    )
    if rows <= 1024:
        head = kernels.linear.prepare(normal(VOCABULARY, HIDDEN))
        yield Case(
            "linear head",
            lambda: kernels.linear(hidden, head, out_dtype=torch.float32),
            2 * VOCABULARY * HIDDEN + 4 * rows * VOCABULARY,
            2.0 * rows * VOCABULARY * HIDDEN,
        )
        rough = kernels.rough_linear.prepare(normal(VOCABULARY, HIDDEN))
        yield Case(
            "rough_linear head",
            lambda: kernels.rough_linear(hidden, rough),
            VOCABULARY * HIDDEN + 2 * rows * (HIDDEN + VOCABULARY),
            2.0 * rows * VOCABULARY * HIDDEN,
            "fp8",
        )


def stream_cases(kernels: KernelSet, rows: int) -> Iterator[Case]:
    """Norms, rotation and hyper-connections."""
    x, weight = normal(rows, HIDDEN), normal(HIDDEN)
    yield Case("rms_norm 5120", lambda: kernels.rms_norm(x, weight, epsilon=1e-20), 4 * x.numel())
    small, small_weight = normal(rows, QUERY_RANK), normal(QUERY_RANK)
    yield Case("rms_norm 1280", lambda: kernels.rms_norm(small, small_weight, epsilon=1e-20), 4 * small.numel())
    angle = normal(rows, ROTARY // 2, dtype=torch.float32)
    query, cosine, sine = normal(rows, HEADS, HEAD_DIM), angle.cos(), angle.sin()
    turned = 4 * rows * HEADS * ROTARY
    yield Case("rotate queries", lambda: kernels.rotate(query, cosine, sine), turned)
    streams, pre = normal(rows, 4, HIDDEN), normal(rows, 4, dtype=torch.float32)
    function = kernels.mix_coefficients.prepare(normal(24, 4 * HIDDEN, dtype=torch.float32, scale=0.01))
    scale, base = torch.ones(3, device="cuda"), normal(24, dtype=torch.float32)
    yield Case(
        "mix_coefficients",
        lambda: kernels.mix_coefficients(
            streams, function, scale, base, epsilon=1e-20, mix_epsilon=1e-6, num_iterations=20
        ),
        2 * streams.numel() + 4 * 24 * 4 * HIDDEN,
    )
    yield Case("collapse_streams", lambda: kernels.collapse_streams(streams, pre), 2.5 * streams.numel())
    mix = normal(rows, 4, 4, dtype=torch.float32)
    yield Case("update_streams", lambda: kernels.update_streams(streams, x, pre, mix), 4.5 * streams.numel())
    advance = lambda: kernels.advance_streams(streams, x, pre, mix, pre, weight, epsilon=1e-20)  # noqa: E731
    yield Case("advance_streams", advance, 5 * streams.numel())
    places = torch.randperm(rows * CHOSEN, device="cuda").view(rows, CHOSEN)
    y = ExpertSum(ExpertRows(normal(rows * CHOSEN, HIDDEN), places), x)
    summing = lambda: kernels.advance_streams(streams, y, pre, mix, pre, weight, epsilon=1e-20)  # noqa: E731
    yield Case("advance_streams with a sum of experts", summing, 5 * streams.numel() + 2 * CHOSEN * x.numel())
    casting = lambda: kernels.advance_streams(streams, y, pre, mix, pre, weight, epsilon=1e-20, with_cast=True)  # noqa: E731
    yield Case("advance_streams with a sum and a cast", casting, 5 * streams.numel() + (2 * CHOSEN + 1) * x.numel())


def cache_cases(kernels: KernelSet, rows: int) -> Iterator[Case]:
    """Records and pair compression."""
    for kind, width in (("window", HEAD_DIM), ("main", HEAD_DIM), ("index", INDEX_DIM)):
        record = kernels.record_formats(kind, width)  # type: ignore[arg-type]
        values = normal(rows, width)
        yield Case(
            f"pack {kind}",
            lambda record=record, values=values: record.pack(values),
            rows * (2 * width + record.num_bytes),
        )
        pool = torch.zeros(4 * rows, record.num_bytes, dtype=torch.uint8, device="cuda")
        places, packed = torch.randperm(4 * rows, device="cuda")[:rows], record.pack(values)
        yield Case(
            f"store {kind}",
            lambda pool=pool, places=places, packed=packed: kernels.store_rows(pool, places, packed),
            2 * packed.numel(),
        )
    both, ring = (normal(rows, 2 * HEAD_DIM, dtype=torch.float32) for _ in "12")
    first_rows = torch.randint(-1, rows, (rows,), device="cuda")
    yield Case("pair_compress", lambda: kernels.pair_compress(both, ring, first_rows), rows * HEAD_DIM * 18)


def released_experts(num_experts: int) -> list[Tensor]:
    """FP4 weights with their scales: gate, up, down."""
    weights = []
    for n, k in ((EXPERT_WIDTH, HIDDEN), (EXPERT_WIDTH, HIDDEN), (HIDDEN, EXPERT_WIDTH)):
        weights.append(torch.randint(0, 256, (num_experts, n, k // 2), device="cuda", dtype=torch.uint8))
        weights.append(torch.randint(112, 116, (num_experts, n, k // 32), device="cuda", dtype=torch.uint8))
    return weights


def kept_row_cases(kernels: KernelSet, rows: int) -> Iterator[Case]:
    """Experts of a layer that sees the ends of prompts only (140 rows each), on one of four prefill ranks."""
    if rows > MAX_KEPT_ROWS:
        return
    prepared = kernels.expert_mlp.prepare(*released_experts(PREFILL_EXPERTS), few_rows=True)
    expert_ids = torch.arange(rows * CHOSEN, device="cuda").view(rows, CHOSEN) % PREFILL_EXPERTS
    x, factor = normal(rows, HIDDEN), normal(rows, CHOSEN, dtype=torch.float32)
    packed = kernels.expert_mlp.pack(Activations(x), prepared)
    size = 3 * EXPERT_WIDTH * HIDDEN
    yield Case(
        f"expert_mlp {rows} kept rows to {PREFILL_EXPERTS}",
        lambda: kernels.expert_mlp(packed, expert_ids, factor, prepared, limit=10.0),
        PREFILL_EXPERTS * size * (1 / 2 + 1 / 32),
        2.0 * rows * CHOSEN * size,
    )


def expert_cases(kernels: KernelSet, rows: int) -> Iterator[Case]:
    """Routing and experts: six local experts of `rows` rows each, as in decode over 64 ranks."""
    hidden, bias = normal(rows, HIDDEN), torch.zeros(EXPERTS, device="cuda")
    router = kernels.route_tokens.prepare(normal(EXPERTS, HIDDEN))
    padding = torch.zeros(rows, dtype=torch.bool, device="cuda")
    yield Case(
        "route_tokens",
        lambda: kernels.route_tokens(hidden, router, bias, padding, num_chosen=CHOSEN, scale=1.5),
        2 * (EXPERTS + rows) * HIDDEN,
        2.0 * rows * EXPERTS * HIDDEN,
    )
    prepared = kernels.expert_mlp.prepare(*released_experts(LOCAL_EXPERTS))
    expert_ids = torch.arange(LOCAL_EXPERTS * rows, device="cuda").unsqueeze(1) % LOCAL_EXPERTS
    x, factor = normal(LOCAL_EXPERTS * rows, HIDDEN), normal(LOCAL_EXPERTS * rows, 1, dtype=torch.float32)
    packed = kernels.expert_mlp.pack(Activations(x), prepared)
    size = 3 * EXPERT_WIDTH * HIDDEN
    yield Case(
        f"expert_mlp {LOCAL_EXPERTS} x {rows} rows",
        lambda: kernels.expert_mlp(packed, expert_ids, factor, prepared, limit=10.0),
        LOCAL_EXPERTS * size / 2 + 4 * x.numel(),
        2.0 * LOCAL_EXPERTS * rows * size,
        "fp8",
    )
    places = torch.randperm(rows * CHOSEN, device="cuda").view(rows, CHOSEN)
    returned, shared = ExpertRows(normal(rows * CHOSEN, HIDDEN), places), normal(rows, HIDDEN)
    yield Case("combine_experts", lambda: kernels.combine_experts(returned, shared), 16 * shared.numel())


def engram_cases(kernels: KernelSet, rows: int) -> Iterator[Case]:
    """N-gram memory with its table on the GPU."""
    history = torch.randint(0, VOCABULARY, (rows, 4), device="cuda")
    multipliers = torch.randint(2**53, 2**55, (4,), device="cuda") | 1
    primes = torch.randint(100_000, 150_000, (3, 8), device="cuda")
    offsets = torch.arange(24, device="cuda").view(3, 8) * 150_000
    found = kernels.engram_rows(history, multipliers, primes, offsets)
    hashing = lambda: kernels.engram_rows(history, multipliers, primes, offsets)  # noqa: E731
    yield Case("engram_rows", hashing, 8 * rows * 28)
    table = torch.randint(0, 100, (24 * 150_000, 256), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((24 * 150_000, 8), 120, device="cuda", dtype=torch.uint8)
    yield Case("engram_lookup", lambda: kernels.engram_lookup(found, table, scale), rows * 24 * (264 + 512))
    streams, memory, weight = normal(rows, 4, HIDDEN), normal(rows, 5 * HIDDEN), normal(4, HIDDEN)
    gate = lambda: kernels.engram_gate(streams, memory, weight, weight, epsilon=1e-20)  # noqa: E731
    yield Case("engram_gate", gate, rows * HIDDEN * 26)


def attention_cases(kernels: KernelSet, rows: int, context: int) -> Iterator[Case]:
    """Selection over half and over all of the context, inside candidate blocks, and sparse attention."""
    requests = max(1, rows // ROWS_PER_REQUEST) if rows <= 1024 else 1
    for ratio in (2, 1):
        entries = context // ratio if requests > 1 else context // ratio // 8
        yield from _index_cases(kernels, rows, requests, ratio, entries)
    window, main = (kernels.record_formats(kind, HEAD_DIM) for kind in ("window", "main"))  # type: ignore[arg-type]
    ring = torch.zeros(140 * requests, window.num_bytes, dtype=torch.uint8, device="cuda")
    ring.copy_(window.pack(normal(len(ring), HEAD_DIM)))
    step = window.pack(normal(rows, HEAD_DIM))
    pool_rows = 1 << 21
    pool = main.pack(normal(1 << 16, HEAD_DIM)).repeat(pool_rows >> 16, 1)
    if window.num_bytes == main.num_bytes:  # a rank keeps such rows in one tensor
        ring, step, pool = torch.cat((ring, step, pool)).split([len(ring), len(step), len(pool)])
    window_rows = torch.randint(0, len(ring) + rows, (rows, WINDOW), device="cuda")
    main_rows = torch.randint(0, pool_rows, (rows, SELECTED), device="cuda")
    query, sink = normal(rows, HEADS, HEAD_DIM), normal(HEADS, dtype=torch.float32)
    for name, with_main in (("512 + 128", True), ("window", False)):
        keys = WINDOW + SELECTED * with_main
        moved = 4 * query.numel() + rows * (WINDOW * window.num_bytes + SELECTED * main.num_bytes * with_main)
        yield Case(
            f"sparse_attention {name}",
            lambda with_main=with_main: kernels.sparse_attention(
                query,
                ring=ring,
                step_records=step,
                window_rows=window_rows,
                window_record=window,
                main=pool if with_main else None,
                main_rows=main_rows if with_main else None,
                main_record=main if with_main else None,
                sink=sink,
                scale=HEAD_DIM**-0.5,
            ),
            moved,
            4.0 * rows * HEADS * HEAD_DIM * keys,
        )


def _index_cases(kernels: KernelSet, rows: int, requests: int, ratio: int, entries: int) -> Iterator[Case]:
    """`entries` of `ratio` tokens each; candidates are kept and looked into where an entry is one token."""
    record, per_block, with_candidates = kernels.record_formats("index", INDEX_DIM), BLOCK // ratio, ratio == 1
    blocks = entries // per_block
    pool = record.pack(normal(entries, INDEX_DIM)).repeat(requests, 1)  # every request has keys of its own
    table = torch.randperm(requests * blocks, device="cuda").view(requests, blocks)
    keys = PagedRows(pool, record, table, per_block)
    starts = torch.arange(requests + 1, device="cuda") * (rows // requests)
    sequence = torch.repeat_interleave(starts.diff())
    visible = torch.full((rows,), entries, device="cuda")
    query, weights = normal(rows, INDEX_HEADS, INDEX_DIM), normal(rows, INDEX_HEADS)
    rule = CandidateRule(2048, 8) if with_candidates else None

    def select(candidates: Tensor | None) -> Any:
        return kernels.index_select(
            query,
            weights,
            keys,
            sequence_starts=starts,
            row_sequence=sequence,
            visible=visible,
            num_selected=SELECTED,
            candidates=candidates,
            rule=rule,
        )

    size = 2.0 * INDEX_HEADS * INDEX_DIM * rows
    moved = requests * entries * record.num_bytes + 2.0 * rows * entries
    yield Case(f"index_select ratio {ratio}, {entries} keys", lambda: select(None), moved, size * entries)
    if with_candidates:
        kept = select(None).candidates
        yield Case(
            "index_select in 2048 blocks of 8",
            lambda: select(kept),
            rows * 16384 * (record.num_bytes / ROWS_PER_REQUEST + 2.0),
            size * 16384,
        )


def sampling_cases(kernels: KernelSet, rows: int) -> Iterator[Case]:
    """One draw a row."""
    if rows > 1024:
        return
    scores = normal(rows, VOCABULARY, dtype=torch.float32)
    seeds, positions = torch.randint(0, 2**60, (2, rows), device="cuda")
    temperatures = torch.ones(rows, device="cuda")

    def draw() -> object:
        return kernels.gumbel_argmax(scores, seeds, positions, temperatures, purpose=0)

    yield Case("gumbel_argmax", draw, 4 * scores.numel())


def all_cases(kernels: KernelSet, rows: int, context: int) -> Iterator[Case]:
    """Every op, in the order of a layer."""
    yield from stream_cases(kernels, rows)
    yield from linear_cases(kernels, rows)
    yield from cache_cases(kernels, rows)
    yield from attention_cases(kernels, rows, context)
    yield from expert_cases(kernels, rows)
    yield from kept_row_cases(kernels, rows)
    yield from engram_cases(kernels, rows)
    yield from sampling_cases(kernels, rows)


def measure(
    kernels: KernelSet, rows: int, context: int, wanted: list[str], flush: Tensor, rates: dict[str, float]
) -> Iterator[Result]:
    """Time the cases whose name begins with one of `wanted` (none: all)."""
    for case in all_cases(kernels, rows, context):
        if wanted and not any(case.name.startswith(name) for name in wanted):
            continue
        roof = max(case.num_bytes / rates["copy"], case.operations / rates[case.rate])
        op = {"pack": "record_formats", "store": "store_rows"}.get(case.name.split()[0], case.name.split()[0])
        yield Result(rows, case.name, kernels.backends[op], time_graph(case.run, flush), roof)


def choose(batch_invariant: bool, backend: str | None) -> KernelSet:
    """The kernels of a rank, or those of one backend where it has the op."""
    overrides = {} if backend is None else dict.fromkeys(load_backend(backend, "cuda").implementations, backend)
    return select_kernels("nvidia", numerics="reference", batch_invariant=batch_invariant, overrides=overrides)


def show(result: Result) -> None:
    """Print one line of the table."""
    share = result.roof_microseconds / result.microseconds
    times = f"{result.microseconds:>9.1f} {result.roof_microseconds:>9.1f} {share:>6.0%}"
    print(f"{result.rows:>5}  {result.name:<36} {result.backend:<10} {times}", flush=True)


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--backend", help="take every op that this backend has from it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    platform = load_platform("nvidia")
    kernels = choose(arguments.batch_invariant, arguments.backend)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=platform.device)
    results = []
    with torch.inference_mode():
        rates = ceilings(flush)
        shown = (
            f"copy {rates['copy'] / 1e6:.2f} TB/s, bf16 {rates['bf16'] / 1e6:.0f} TF, fp8 {rates['fp8'] / 1e6:.0f} TF"
        )
        print(f"{torch.cuda.get_device_name()}: {shown}")
        print(f"{'rows':>5}  {'op':<36} {'backend':<10} {'us':>9} {'roof us':>9} {'share':>6}")
        for rows in arguments.rows:
            for result in measure(kernels, rows, arguments.context, arguments.ops, flush, rates):
                results.append(result)
                show(result)
    if arguments.json is not None:
        record = {"rates": rates, "kernels": kernels.describe(), "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
