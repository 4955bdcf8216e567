"""For every op of a kernel set: the same rows in any company.

A case holds data for `NUM_ROWS` rows and runs the op on some of them, in the order given. It returns what belongs to
each row, so that a row's bits can be compared between companies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from support import step_cases
from support.op_cases import Bench, fp4_experts, fp8_matrix
from torch import Tensor

from deepinfer.kernels.ops import Activations, CandidateRule, ExpertRows, ExpertSum, PagedRows

NUM_ROWS = 256
Run = Callable[[Tensor], list[Tensor]]  # row numbers [n] -> tensors [n, ...], entry i belongs to row i of the argument
_ENTRIES_PER_BLOCK = 16
_NUM_SEQUENCES = 9


def _record_formats(bench: Bench) -> Run:
    formats = [
        bench.kernels.record_formats(kind, width)
        for kind, width in (
            ("window", bench.sizes.head_dim),
            ("main", bench.sizes.head_dim),
            ("index", bench.sizes.index_dim),
        )
    ]
    values = [bench.wide(NUM_ROWS, record.width).to(bench.kernels.numerics.dtype) for record in formats]

    def run(rows: Tensor) -> list[Tensor]:
        packed = [record.pack(value[rows]) for record, value in zip(formats, values, strict=True)]
        return packed + [record.unpack(part) for record, part in zip(formats, packed, strict=True)]

    return run


def _store_rows(bench: Bench) -> Run:
    num_bytes = bench.kernels.record_formats("main", bench.sizes.head_dim).num_bytes
    records = bench.integers(0, 256, NUM_ROWS, num_bytes).to(torch.uint8)
    targets = torch.randperm(2 * NUM_ROWS, generator=bench.generator)[:NUM_ROWS].to(bench.device)

    def run(rows: Tensor) -> list[Tensor]:
        pool = torch.zeros(2 * NUM_ROWS, num_bytes, dtype=torch.uint8, device=bench.device)
        bench.kernels.store_rows(pool, targets[rows], records[rows])
        return [pool[targets[rows]]]

    return run


def _linear(bench: Bench) -> Run:
    sizes, linear = bench.sizes, bench.kernels.linear
    x = bench.normal(NUM_ROWS, sizes.hidden, dtype=bench.kernels.numerics.dtype)
    weight = linear.prepare(bench.normal(sizes.experts, sizes.hidden))
    return lambda rows: [linear(x[rows], weight, out_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]


def _rough_linear(bench: Bench) -> Run:
    sizes, linear = bench.sizes, bench.kernels.rough_linear
    x = bench.normal(NUM_ROWS, sizes.hidden, dtype=bench.kernels.numerics.dtype)
    weight = linear.prepare(bench.normal(sizes.experts, sizes.hidden))
    return lambda rows: [linear(x[rows], weight)]


def _quantized_linear(bench: Bench) -> Run:
    sizes, linear = bench.sizes, bench.kernels.quantized_linear
    x = bench.normal(NUM_ROWS, sizes.hidden, dtype=bench.kernels.numerics.dtype)
    weight = linear.prepare(*fp8_matrix(bench, sizes.expert_width, sizes.hidden))
    norm = bench.normal(sizes.hidden)
    both = bench.normal(NUM_ROWS, 2 * sizes.hidden, dtype=bench.kernels.numerics.dtype, scale=8)
    return lambda rows: [
        linear(x[rows], weight),
        linear.after_norm(x[rows], norm, weight, epsilon=1e-6),
        linear.after_swiglu(both[rows], weight, limit=10.0),
    ]


def _grouped_linear(bench: Bench) -> Run:
    sizes, linear = bench.sizes, bench.kernels.grouped_linear
    x = bench.normal(NUM_ROWS, sizes.groups, sizes.group_width, dtype=bench.kernels.numerics.dtype)
    matrix = fp8_matrix(bench, sizes.groups * 64, sizes.group_width)
    weight = linear.prepare(*matrix, num_groups=sizes.groups)
    return lambda rows: [linear(x[rows], weight)]


def _rms_norm(bench: Bench) -> Run:
    x = bench.normal(NUM_ROWS, bench.sizes.hidden, dtype=bench.kernels.numerics.dtype)
    weight = bench.normal(bench.sizes.hidden)
    return lambda rows: [bench.kernels.rms_norm(x[rows], weight, epsilon=1e-6)]


def _rotate(bench: Bench) -> Run:
    sizes = bench.sizes
    angle = bench.normal(NUM_ROWS, sizes.rotary // 2, dtype=torch.float32, scale=100)
    x = bench.normal(NUM_ROWS, sizes.heads, sizes.head_dim, dtype=bench.kernels.numerics.dtype)
    cosine, sine = angle.cos(), angle.sin()
    return lambda rows: [
        bench.kernels.rotate(x[rows], cosine[rows], sine[rows], inverse=inverse) for inverse in (False, True)
    ]


def _mix_coefficients(bench: Bench) -> Run:
    sizes = bench.sizes
    streams = bench.normal(NUM_ROWS, 4, sizes.hidden, dtype=bench.kernels.numerics.dtype)
    function = bench.normal(24, 4 * sizes.hidden, dtype=torch.float32, scale=(4 * sizes.hidden) ** -0.5)
    scale, base = torch.ones(3, device=bench.device), bench.normal(24, dtype=torch.float32, scale=0.5)
    prepared = bench.kernels.mix_coefficients.prepare(function)

    def run(rows: Tensor) -> list[Tensor]:
        found = bench.kernels.mix_coefficients(
            streams[rows], prepared, scale, base, epsilon=1e-6, mix_epsilon=1e-6, num_iterations=20
        )
        return [found.pre, found.post, found.mix]

    return run


def _open_streams(bench: Bench) -> Run:
    embedding, token_ids = bench.normal(30, bench.sizes.hidden), bench.integers(0, 30, NUM_ROWS)
    return lambda rows: list(bench.kernels.open_streams(embedding, token_ids[rows], num_streams=4))


def _collapse_streams(bench: Bench) -> Run:
    streams = bench.normal(NUM_ROWS, 4, bench.sizes.hidden, dtype=bench.kernels.numerics.dtype)
    pre = bench.normal(NUM_ROWS, 4, dtype=torch.float32)
    return lambda rows: [bench.kernels.collapse_streams(streams[rows], pre[rows])]


def _update_streams(bench: Bench) -> Run:
    hidden, dtype = bench.sizes.hidden, bench.kernels.numerics.dtype
    streams, y = bench.normal(NUM_ROWS, 4, hidden, dtype=dtype), bench.normal(NUM_ROWS, hidden, dtype=dtype)
    post = bench.normal(NUM_ROWS, 4, dtype=torch.float32)
    mix = bench.normal(NUM_ROWS, 4, 4, dtype=torch.float32)
    return lambda rows: [bench.kernels.update_streams(streams[rows], y[rows], post[rows], mix[rows])]


def _advance_streams(bench: Bench) -> Run:
    hidden, dtype = bench.sizes.hidden, bench.kernels.numerics.dtype
    streams, y = bench.normal(NUM_ROWS, 4, hidden, dtype=dtype), bench.normal(NUM_ROWS, hidden, dtype=dtype)
    post, pre = bench.normal(NUM_ROWS, 4, dtype=torch.float32), bench.normal(NUM_ROWS, 4, dtype=torch.float32)
    mix, weight = bench.normal(NUM_ROWS, 4, 4, dtype=torch.float32), bench.normal(hidden)
    parts = bench.normal(2 * NUM_ROWS, hidden, dtype=dtype)
    places = bench.integers(-1, len(parts), NUM_ROWS, bench.sizes.chosen)

    def run(rows: Tensor) -> list[Tensor]:
        rest = post[rows], mix[rows], pre[rows], weight
        outputs = y[rows], ExpertSum(ExpertRows(parts, places[rows]), y[rows])
        advance = bench.kernels.advance_streams
        found = []
        for output in outputs:
            updated, read = advance(streams[rows], output, *rest, epsilon=1e-6, with_cast=True)
            found += [updated, read.values]
            if read.cast is not None:
                found += [read.cast.packed[:, : hidden + hidden // 128], read.cast.scales]
        return found

    return run


def _engram_rows(bench: Bench) -> Run:
    history = bench.integers(0, 129280, NUM_ROWS, 4)
    multipliers = bench.integers(2**53, 2**55, 4) | 1
    primes = torch.tensor([[1009, 1013], [2003, 2011], [3001, 3011]], device=bench.device)
    offsets = torch.arange(6, device=bench.device).view(3, 2) * 4000
    return lambda rows: [bench.kernels.engram_rows(history[rows], multipliers, primes, offsets)]


def _engram_lookup(bench: Bench) -> Run:
    codes = bench.normal(24000, 64, scale=20).to(torch.float8_e4m3fn)
    scale = bench.integers(100, 140, 24000, 2).to(torch.uint8)
    numbers = bench.integers(0, 24000, NUM_ROWS, 6)
    return lambda rows: [bench.kernels.engram_lookup(numbers[rows], codes, scale)]


def _engram_gate(bench: Bench) -> Run:
    hidden, dtype = bench.sizes.hidden, bench.kernels.numerics.dtype
    streams, memory = bench.normal(NUM_ROWS, 4, hidden, dtype=dtype), bench.normal(NUM_ROWS, 5 * hidden, dtype=dtype)
    weights = bench.normal(4, hidden), bench.normal(4, hidden)
    return lambda rows: [bench.kernels.engram_gate(streams[rows], memory[rows], *weights, epsilon=1e-6)]


def _pair_compress(bench: Bench) -> Run:
    values = bench.normal(NUM_ROWS, 2 * bench.sizes.head_dim, dtype=torch.float32)
    stored = bench.normal(NUM_ROWS, 2 * bench.sizes.head_dim, dtype=torch.float32)
    return lambda rows: [bench.kernels.pair_compress(values[rows], stored, rows)]


def _latent_records(bench: Bench) -> Run:
    sizes, dtype = bench.sizes, bench.kernels.numerics.dtype
    latent, weight = bench.normal(NUM_ROWS, sizes.head_dim, dtype=dtype), bench.normal(sizes.head_dim, dtype=dtype)
    angle = bench.normal(NUM_ROWS, sizes.rotary // 2, dtype=torch.float32, scale=100)
    record = bench.kernels.record_formats("window", sizes.head_dim)
    return lambda rows: [
        bench.kernels.latent_records(
            latent[rows], weight, angle[rows].cos(), angle[rows].sin(), epsilon=1e-6, record=record
        )
    ]


def _locate_entries(bench: Bench) -> Run:
    table, sequence = bench.integers(0, 900, 4, 6), bench.integers(0, 4, NUM_ROWS)
    entries = bench.integers(-1, 96, NUM_ROWS, bench.sizes.selected)
    return lambda rows: [bench.kernels.locate_entries(entries[rows], sequence[rows], table, entries_per_block=16)]


def _index_select(bench: Bench) -> Run:
    """Rows of several sequences of different lengths; the block table is as wide as the longest one in the company."""
    sizes, dtype = bench.sizes, bench.kernels.numerics.dtype
    num_blocks = -(-sizes.entries // _ENTRIES_PER_BLOCK)
    table = (torch.randperm(_NUM_SEQUENCES * num_blocks, generator=bench.generator) + 1).view(-1, num_blocks)
    record = bench.kernels.record_formats("index", sizes.index_dim)
    keys = bench.normal((_NUM_SEQUENCES * num_blocks + 1) * _ENTRIES_PER_BLOCK, sizes.index_dim, dtype=dtype)
    pool, table = record.pack(keys), table.to(bench.device)
    sequence = torch.arange(NUM_ROWS, device=bench.device) * _NUM_SEQUENCES // NUM_ROWS
    lengths = torch.linspace(1, sizes.entries, _NUM_SEQUENCES).long().to(bench.device)
    visible = (lengths[sequence] - bench.integers(0, 30, NUM_ROWS)).clamp_min(0)
    query = bench.normal(NUM_ROWS, sizes.index_heads, sizes.index_dim, dtype=dtype)
    weights = bench.normal(NUM_ROWS, sizes.index_heads, dtype=dtype)
    rule = CandidateRule(num_blocks=max(3, sizes.selected), block_size=4)

    def run(rows: Tensor) -> list[Tensor]:
        present = list(dict.fromkeys(sequence[rows].tolist()))  # in order of appearance
        place = torch.tensor([present.index(number) for number in sequence[rows].tolist()], device=rows.device)
        order = torch.argsort(place * NUM_ROWS + rows)
        counts = torch.bincount(place, minlength=len(present))
        width = max(1, int((-(-visible[rows].amax() // _ENTRIES_PER_BLOCK)).item()))
        chosen_keys = PagedRows(pool, record, table[present, :width], _ENTRIES_PER_BLOCK)

        def select(candidates: Tensor | None) -> tuple[Tensor, Tensor]:
            chosen = bench.kernels.index_select(
                query[rows][order], weights[rows][order], chosen_keys,
                sequence_starts=torch.cat((counts.new_zeros(1), counts.cumsum(0))),
                row_sequence=place[order], visible=visible[rows][order], num_selected=sizes.selected,
                candidates=candidates, rule=rule,
            )  # fmt: skip
            assert chosen.candidates is not None
            return chosen.entries, chosen.candidates

        entries, blocks = select(None)
        inside, _ = select(blocks)
        back = torch.argsort(order)
        return [entries[back], blocks[back], inside[back]]

    return run


def _sparse_attention(bench: Bench) -> Run:
    """A window row is read from the ring when its own row runs in another step, else from this step's records."""
    sizes, dtype, num_old = bench.sizes, bench.kernels.numerics.dtype, 90
    window = bench.kernels.record_formats("window", sizes.head_dim)
    main = bench.kernels.record_formats("main", sizes.head_dim)
    own = window.pack(bench.normal(NUM_ROWS, sizes.head_dim, dtype=dtype))
    ring = torch.cat((window.pack(bench.normal(num_old, sizes.head_dim, dtype=dtype)), own))
    pool = main.pack(bench.normal(700, sizes.head_dim, dtype=dtype))
    query = bench.normal(NUM_ROWS, sizes.heads, sizes.head_dim, dtype=dtype, scale=1.5)
    wanted = bench.integers(-1, num_old + NUM_ROWS, NUM_ROWS, sizes.window)
    main_rows = bench.integers(-1, 700, NUM_ROWS, sizes.selected)
    wanted[3], main_rows[3], main_rows[5] = -1, -1, -1
    sink = bench.normal(sizes.heads, dtype=torch.float32)

    def run(rows: Tensor) -> list[Tensor]:
        place = torch.full((len(ring),), -1, device=rows.device)
        place[num_old + rows] = torch.arange(len(rows), device=rows.device)
        mine = wanted[rows]
        in_step = (mine >= 0) & (place[mine.clamp_min(0)] >= 0)
        window_rows = torch.where(in_step, len(ring) + place[mine.clamp_min(0)], mine)
        return [
            bench.kernels.sparse_attention(
                query[rows], ring=ring, step_records=own[rows], window_rows=window_rows, window_record=window,
                main=pool if with_main else None, main_rows=main_rows[rows] if with_main else None,
                main_record=main if with_main else None, sink=sink, scale=sizes.head_dim**-0.5,
            )
            for with_main in (True, False)
        ]  # fmt: skip

    return run


def _route_tokens(bench: Bench) -> Run:
    sizes, route = bench.sizes, bench.kernels.route_tokens
    hidden = bench.normal(NUM_ROWS, sizes.hidden, dtype=bench.kernels.numerics.dtype)
    weight = bench.normal(sizes.experts, sizes.hidden, scale=4 * sizes.hidden**-0.5)
    weight[1::3] = weight[0::3][: len(weight[1::3])]
    router, bias = route.prepare(weight), bench.normal(sizes.experts, dtype=torch.float32, scale=0.1)
    padding = bench.integers(0, 2, NUM_ROWS) == 0
    return lambda rows: list(route(hidden[rows], router, bias, padding[rows], num_chosen=sizes.chosen, scale=1.5))


def _expert_mlp(bench: Bench) -> Run:
    """A company puts other rows, or none, before a row at its own expert and at the experts before."""
    num_experts = 5
    x = bench.normal(NUM_ROWS, bench.sizes.hidden, dtype=bench.kernels.numerics.dtype)
    factor = bench.normal(NUM_ROWS, dtype=torch.float32).abs() + 0.1
    expert = bench.integers(0, num_experts, NUM_ROWS)
    experts = bench.kernels.expert_mlp.prepare(*fp4_experts(bench, num_experts))

    def run(rows: Tensor) -> list[Tensor]:
        packed = bench.kernels.expert_mlp.pack(Activations(x[rows]), experts)
        out = bench.kernels.expert_mlp(packed, expert[rows, None], factor[rows, None], experts, limit=10.0)
        return [out.values[out.places.flatten().long()]]

    return run


def _combine_experts(bench: Bench) -> Run:
    sizes, dtype = bench.sizes, bench.kernels.numerics.dtype
    parts, shared = (
        bench.normal(NUM_ROWS * sizes.chosen, sizes.hidden, dtype=dtype),
        bench.normal(NUM_ROWS, sizes.hidden, dtype=dtype),
    )
    places = bench.integers(-1, len(parts), NUM_ROWS, sizes.chosen)
    return lambda rows: [bench.kernels.combine_experts(ExpertRows(parts, places[rows]), shared[rows])]


def _gumbel_argmax(bench: Bench) -> Run:
    scores = bench.normal(NUM_ROWS, bench.sizes.vocabulary, dtype=torch.float32)
    scores[:, ::7] = -torch.inf
    seeds, positions = bench.integers(0, 2**62, NUM_ROWS), bench.integers(0, 2**40, NUM_ROWS)
    temperatures = torch.full((NUM_ROWS,), 0.8, device=bench.device)
    return lambda rows: [
        bench.kernels.gumbel_argmax(scores[rows], seeds[rows], positions[rows], temperatures[rows], purpose=3)
    ]


CASES: dict[str, Callable[[Bench], Run]] = {
    "record_formats": _record_formats,
    "store_rows": _store_rows,
    "linear": _linear,
    "rough_linear": _rough_linear,
    "quantized_linear": _quantized_linear,
    "grouped_linear": _grouped_linear,
    "rms_norm": _rms_norm,
    "rotate": _rotate,
    "mix_coefficients": _mix_coefficients,
    "open_streams": _open_streams,
    "collapse_streams": _collapse_streams,
    "update_streams": _update_streams,
    "advance_streams": _advance_streams,
    "engram_rows": _engram_rows,
    "engram_lookup": _engram_lookup,
    "engram_gate": _engram_gate,
    "pair_compress": _pair_compress,
    "latent_records": _latent_records,
    "locate_entries": _locate_entries,
    "index_select": _index_select,
    "sparse_attention": _sparse_attention,
    "route_tokens": _route_tokens,
    "expert_mlp": _expert_mlp,
    "combine_experts": _combine_experts,
    "gumbel_argmax": _gumbel_argmax,
    **step_cases.CASES,
}
