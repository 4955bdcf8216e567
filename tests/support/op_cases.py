"""Random cases of the ops of a kernel set, each compared with the reference: bitwise where bits are promised.

`small()` sizes run on a CPU under Triton's interpreter; `released()` sizes are those of the released model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.kernels.ops import REFERENCE_NUMERICS, Activations, CandidateRule, ExpertRows, ExpertSum, PagedRows
from deepinfer.kernels.registry import KernelSet, select_kernels

Check = Callable[["Bench"], None]
ENTRIES_PER_BLOCK = 16


@dataclass(slots=True, frozen=True)
class Sizes:
    """Shapes of the cases; names as in the model's configuration."""

    rows: int
    hidden: int
    heads: int
    head_dim: int
    rotary: int
    window: int
    selected: int
    index_heads: int
    index_dim: int
    entries: int
    experts: int
    chosen: int
    expert_width: int
    groups: int
    group_width: int
    vocabulary: int


def small() -> Sizes:
    """Sizes that the interpreter gets through in seconds."""
    return Sizes(
        rows=5, hidden=128, heads=4, head_dim=64, rotary=16, window=40, selected=8, index_heads=8, index_dim=32,
        entries=150, experts=24, chosen=6, expert_width=64, groups=2, group_width=128, vocabulary=515,
    )  # fmt: skip


def released(rows: int = 256) -> Sizes:
    """The released model's sizes."""
    return Sizes(
        rows=rows, hidden=5120, heads=64, head_dim=512, rotary=64, window=128, selected=512, index_heads=32,
        index_dim=128, entries=20000, experts=384, chosen=6, expert_width=2304, groups=8, group_width=4096,
        vocabulary=129280,
    )  # fmt: skip


@dataclass(slots=True)
class Bench:
    """What a case works with: the kernels under test, the reference, sizes, device and a generator."""

    kernels: KernelSet
    sizes: Sizes
    device: torch.device
    seed: int = 0
    reference: KernelSet = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.reference = select_kernels("cpu", numerics=REFERENCE_NUMERICS, batch_invariant=True, overrides={})
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Random values on the device."""
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Random int64 in [low, high) on the device."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def wide(self, *shape: int) -> Tensor:
        """bf16 values whose groups of 16 differ by many powers of two; some groups are zero, some hold ties."""
        values = torch.randn(*shape, generator=self.generator).unflatten(-1, (-1, 16))
        powers = torch.randint(-30, 12, values.shape[:-1], generator=self.generator)
        powers[..., ::7] = 0
        values = values * torch.exp2(powers.float()).unsqueeze(-1)
        values[..., ::5, :] = (values[..., ::5, :] * 2).round() / 2
        values[..., 3::11, :] = 0
        return values.flatten(-2).to(torch.bfloat16).to(self.device)


def close(value: Tensor, wanted: Tensor, bound: float) -> None:
    """Assert a relative L2 error below `bound`; a NaN never passes."""
    value, wanted = value.float(), wanted.float().to(value.device)
    error = float((value - wanted).norm() / wanted.norm().clamp_min(1e-30))
    assert error <= bound, f"relative error {error:.2e} is above {bound:.0e}"


def same(value: Tensor, wanted: Tensor) -> None:
    """Assert equal bits."""
    wanted = wanted.to(value.device)
    assert value.shape == wanted.shape, f"{value.shape} instead of {wanted.shape}"
    assert value.dtype == wanted.dtype, f"{value.dtype} instead of {wanted.dtype}"
    different = int((value != wanted).sum())
    assert not different, f"{different} of {value.numel()} values differ"


def check_records(bench: Bench) -> None:
    """Packing, unpacking and storing, bit for bit."""
    for kind, width in (
        ("window", bench.sizes.head_dim),
        ("main", bench.sizes.head_dim),
        ("index", bench.sizes.index_dim),
    ):
        own, wanted = bench.kernels.record_formats(kind, width), bench.reference.record_formats(kind, width)
        # index keys may be held with one power of two a row: then groups must not lie too far apart
        make = bench.wide if kind != "index" or own.name == wanted.name else bench.normal
        values = make(2 * bench.sizes.rows + 1, width)
        records = own.pack(values)
        given = torch.empty_like(records)
        same(own.pack(values, out=given), records)
        same(given, records)
        same(own.unpack(records), wanted.unpack(wanted.pack(values)))
        if own.name == wanted.name:
            same(records, wanted.pack(values))
        pool, other = (
            torch.zeros(50 + len(values), own.num_bytes, dtype=torch.uint8, device=bench.device) for _ in "12"
        )
        rows = torch.randperm(len(pool), generator=bench.generator)[: len(values)].to(bench.device)
        rows[::5] = -1
        bench.kernels.store_rows(pool, rows, records)
        bench.reference.store_rows(other, rows, records)
        same(pool, other)
        assert bool(other[rows[rows >= 0]].any(1).all())


def check_norm_and_rotation(bench: Bench) -> None:
    """RMS norm and both directions of the rotary embedding."""
    sizes = bench.sizes
    x, weight = bench.normal(sizes.rows, sizes.hidden), bench.normal(sizes.hidden)
    close(bench.kernels.rms_norm(x, weight, epsilon=1e-20), bench.reference.rms_norm(x, weight, epsilon=1e-20), 2e-3)
    angle = bench.normal(sizes.rows, sizes.rotary // 2, dtype=torch.float32, scale=100)
    query = bench.normal(sizes.rows, sizes.heads, sizes.head_dim)
    for inverse in (False, True):
        wanted = bench.reference.rotate(query, angle.cos(), angle.sin(), inverse=inverse)
        close(bench.kernels.rotate(query.clone(), angle.cos(), angle.sin(), inverse=inverse), wanted, 5e-4)
    _, apart = bench.normal(sizes.rows, 3 * sizes.head_dim).split([2 * sizes.head_dim, sizes.head_dim], 1)
    weight = weight[: sizes.head_dim]
    close(
        bench.kernels.rms_norm(apart, weight, epsilon=1e-20),
        bench.reference.rms_norm(apart, weight, epsilon=1e-20),
        2e-3,
    )
    check_latent_records(bench, apart, weight, angle)


def check_latent_records(bench: Bench, latent: Tensor, weight: Tensor, angle: Tensor) -> None:
    """Records of latents, in each format that a device holds."""
    formats = [kernels.record_formats("window", latent.shape[1]) for kernels in (bench.kernels, bench.reference)]
    own, packed = formats
    wanted = bench.reference.latent_records(latent, weight, angle.cos(), angle.sin(), epsilon=1e-20, record=packed)
    out = torch.empty(len(latent), own.num_bytes, dtype=torch.uint8, device=bench.device)
    found = bench.kernels.latent_records(latent, weight, angle.cos(), angle.sin(), epsilon=1e-20, record=own, out=out)
    same(found, out)
    close(own.unpack(found), packed.unpack(wanted), 5e-3)


def check_open_streams(bench: Bench) -> None:
    """Embedded rows, bit for bit."""
    embedding, token_ids = bench.normal(30, bench.sizes.hidden), bench.integers(0, 30, bench.sizes.rows)
    opened = bench.reference.open_streams(embedding, token_ids, num_streams=4)
    for part, whole in zip(bench.kernels.open_streams(embedding, token_ids, num_streams=4), opened, strict=True):
        same(part, whole)


def check_hyper_connection(bench: Bench) -> None:
    """Coefficients with Sinkhorn, of a function of float32 and not of bf16, collapse and update."""
    sizes = bench.sizes
    streams = bench.normal(sizes.rows, 4, sizes.hidden)
    function = bench.normal(24, 4 * sizes.hidden, dtype=torch.float32, scale=(4 * sizes.hidden) ** -0.5)
    scale, base = torch.ones(3, device=bench.device), bench.normal(24, dtype=torch.float32, scale=0.5)
    own, wanted = (
        kernels.mix_coefficients(
            streams,
            kernels.mix_coefficients.prepare(function),
            scale,
            base,
            epsilon=1e-20,
            mix_epsilon=1e-6,
            num_iterations=20,
        )
        for kernels in (bench.kernels, bench.reference)
    )
    for part in ("pre", "post", "mix"):
        close(getattr(own, part), getattr(wanted, part), 2e-5)
    y = bench.normal(sizes.rows, sizes.hidden)
    close(
        bench.kernels.collapse_streams(streams, wanted.pre), bench.reference.collapse_streams(streams, wanted.pre), 1e-3
    )
    updated = bench.reference.update_streams(streams, y, wanted.post, wanted.mix)
    close(bench.kernels.update_streams(streams, y, wanted.post, wanted.mix), updated, 1e-3)
    values = bench.normal(7 * sizes.rows, sizes.hidden)
    rows = ExpertRows(values, bench.integers(-1, len(values) - 1, sizes.rows, sizes.chosen))
    values[-1], rows.places[0] = torch.nan, -1
    rest = wanted.post, wanted.mix, wanted.pre, bench.normal(sizes.hidden)
    for output in (y, ExpertSum(rows, y)):
        advanced, other = (
            kernels.advance_streams(streams, output, *rest, epsilon=1e-20)
            for kernels in (bench.kernels, bench.reference)
        )
        close(advanced[0], other[0], 1e-3)
        close(advanced[1].values, other[1].values, 2e-3)


def check_engram(bench: Bench) -> None:
    """Hash and look-up bit for bit, the gate within rounding."""
    sizes = bench.sizes
    history = bench.integers(0, 129280, sizes.rows, 4)
    multipliers = bench.integers(2**53, 2**55, 4) | 1
    primes = torch.tensor([[1009, 1013], [2003, 2011], [3001, 3011]], device=bench.device)
    offsets = torch.arange(6, device=bench.device).view(3, 2) * 4000
    rows = bench.kernels.engram_rows(history, multipliers, primes, offsets)
    same(rows, bench.reference.engram_rows(history, multipliers, primes, offsets))
    codes = bench.normal(24000, 64, scale=20).to(torch.float8_e4m3fn)
    scale = bench.integers(100, 140, 24000, 2).to(torch.uint8)
    same(bench.kernels.engram_lookup(rows, codes, scale), bench.reference.engram_lookup(rows, codes, scale))
    streams, memory = bench.normal(sizes.rows, 4, sizes.hidden), bench.normal(sizes.rows, 5 * sizes.hidden)
    weights = bench.normal(4, sizes.hidden), bench.normal(4, sizes.hidden)
    wanted = bench.reference.engram_gate(streams, memory, *weights, epsilon=1e-20)
    close(bench.kernels.engram_gate(streams, memory, *weights, epsilon=1e-20), wanted, 1e-3)


def check_pair_compress(bench: Bench) -> None:
    """Means of two tokens, the first one before the row or in the ring; pool rows of entries, bit for bit."""
    num_rows, width = bench.sizes.rows, 2 * bench.sizes.head_dim
    rows, stored = (bench.normal(count, width, dtype=torch.float32) for count in (num_rows, 24))
    first_rows = bench.integers(-1, 24, num_rows)
    first_rows[0], first_rows[2] = 3, -1
    wanted = bench.reference.pair_compress(rows, stored, first_rows)
    close(bench.kernels.pair_compress(rows, stored, first_rows), wanted, 1e-3)
    entries, table = bench.integers(-1, 96, num_rows, bench.sizes.selected), bench.integers(0, 900, 4, 6)
    sequence = bench.integers(0, 4, num_rows)
    found = bench.kernels.locate_entries(entries, sequence, table, entries_per_block=16)
    same(found, bench.reference.locate_entries(entries, sequence, table, entries_per_block=16))


def check_routing(bench: Bench) -> None:
    """Ids equal with ties between equal experts; weights to float32 accuracy; the sum."""
    sizes = bench.sizes
    hidden = bench.normal(sizes.rows, sizes.hidden, scale=4)
    hidden[0] = -30.0
    router = torch.eye(sizes.experts, sizes.hidden, device=bench.device).bfloat16()  # logits are values of hidden
    router[1::3] = router[0::3][: len(router[1::3])]
    bias = torch.zeros(sizes.experts, device=bench.device)
    padding = torch.arange(sizes.rows, device=bench.device) == 1
    ids, weights, *wanted = (
        part
        for route in (bench.kernels.route_tokens, bench.reference.route_tokens)
        for part in route(hidden, route.prepare(router), bias, padding, num_chosen=sizes.chosen, scale=1.5)
    )
    assert bool((ids < 0).any(1).equal(padding))
    same(ids, wanted[0])
    close(weights, wanted[1], 1e-5)
    values, shared = bench.normal(7 * sizes.rows, sizes.hidden), bench.normal(sizes.rows, sizes.hidden)
    rows = ExpertRows(values, bench.integers(-1, len(values) - 1, sizes.rows, sizes.chosen))
    values[-1], rows.places[0] = torch.nan, -1
    close(bench.kernels.combine_experts(rows, shared), bench.reference.combine_experts(rows, shared), 1e-3)


def check_unusable_rows(bench: Bench) -> None:
    """NaN logits still give distinct expert ids in range: what follows must not read outside the weights."""
    sizes, route = bench.sizes, bench.kernels.route_tokens
    hidden, bias = torch.full_like(bench.normal(2, sizes.hidden), torch.nan), bench.normal(sizes.experts).float()
    bias[3:] = torch.nan
    hidden[1] = 1.0
    router, nobody = route.prepare(bench.normal(sizes.experts, sizes.hidden)), torch.zeros_like(bias[:2]).bool()
    ids, weights = route(hidden, router, bias, nobody, num_chosen=sizes.chosen, scale=1.0)
    assert (ids.diff(dim=1) > 0).all()
    assert ((ids >= 0) & (ids < sizes.experts)).all()
    assert weights[0].isnan().all()


def fp8_matrix(bench: Bench, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A released FP8 matrix of size about 1 / sqrt(columns), with scales of neighbouring tiles that differ by 2^3."""
    codes = bench.normal(rows, columns, scale=100).clamp(-448, 448).to(torch.float8_e4m3fn)
    center = 127 - 7 - int(columns).bit_length() // 2
    scale = bench.integers(center, center + 4, -(-rows // 32), -(-columns // 32)).to(torch.uint8)
    return codes, scale


def check_linear(bench: Bench) -> None:
    """All three linear maps within the rounding of their output."""
    sizes, own, wanted = bench.sizes, bench.kernels, bench.reference
    x, weight = bench.normal(sizes.rows, sizes.hidden), bench.normal(sizes.experts, sizes.hidden)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 3e-3)):
        given = wanted.linear(x, wanted.linear.prepare(weight), out_dtype=dtype)
        close(own.linear(x, own.linear.prepare(weight), out_dtype=dtype), given, bound)
    given = wanted.linear(x.float() / 3, wanted.linear.prepare(weight), out_dtype=torch.float32)
    close(own.linear(x.float() / 3, own.linear.prepare(weight), out_dtype=torch.float32), given, 1e-5)
    given = wanted.rough_linear(x, wanted.rough_linear.prepare(weight))
    close(own.rough_linear(x, own.rough_linear.prepare(weight)).float(), given, 6e-2)
    matrix = fp8_matrix(bench, sizes.expert_width, sizes.hidden)
    prepared = own.quantized_linear.prepare(*matrix)
    close(own.quantized_linear(x, prepared), wanted.quantized_linear(x, wanted.quantized_linear.prepare(*matrix)), 4e-3)
    check_fused_inputs(bench, matrix)
    matrix = fp8_matrix(bench, sizes.groups * 64, sizes.group_width)
    y = bench.normal(sizes.rows, sizes.groups, sizes.group_width)
    given = wanted.grouped_linear(y, wanted.grouped_linear.prepare(*matrix, num_groups=sizes.groups))
    close(own.grouped_linear(y, own.grouped_linear.prepare(*matrix, num_groups=sizes.groups)), given, 4e-3)


def check_fused_inputs(bench: Bench, matrix: tuple[Tensor, Tensor]) -> None:
    """Products of what a norm of rows that lie apart, or SwiGLU with active clamps, makes."""
    width = matrix[0].shape[1]
    _, apart = bench.normal(bench.sizes.rows, 2 * width).split(width, 1)
    norm, both = bench.normal(width), bench.normal(bench.sizes.rows, 2 * width, scale=8)
    results = []
    for kernels in (bench.kernels, bench.reference):
        linear = kernels.quantized_linear
        prepared = linear.prepare(*matrix)
        results.append(
            (linear.after_norm(apart, norm, prepared, epsilon=1e-6), linear.after_swiglu(both, prepared, limit=10.0))
        )
    for own, wanted in zip(*results, strict=True):
        close(own, wanted, 6e-3)


def fp4_experts(bench: Bench, num_experts: int) -> list[Tensor]:
    """Released weights of a few experts: gate, up and down with their scales."""
    weights = []
    for rows, columns in ((bench.sizes.expert_width, bench.sizes.hidden),) * 2 + (
        (bench.sizes.hidden, bench.sizes.expert_width),
    ):
        center = 127 - int(columns).bit_length() // 2 - 1
        weights.append(bench.integers(0, 256, num_experts, rows, columns // 2).to(torch.uint8))
        weights.append(bench.integers(center - 2, center + 2, num_experts, rows, columns // 32).to(torch.uint8))
    return weights


def check_experts(bench: Bench) -> None:
    """Routed experts with an idle one, uneven counts, copies and whole rows for nobody, and no row at all."""
    sizes, own, wanted = bench.sizes, bench.kernels, bench.reference
    weights = fp4_experts(bench, 4)
    rows = bench.normal(3 * sizes.rows + 2, sizes.hidden)
    expert_ids = bench.integers(-1, 3, len(rows), 2)
    expert_ids[expert_ids == 1] = 3
    expert_ids[: sizes.rows + 1, 0], expert_ids[5] = 2, -1
    rows[5] = torch.nan
    factor = bench.normal(len(rows), 2, dtype=torch.float32).abs() + 0.1
    given = wanted.expert_mlp(rows, expert_ids, factor, wanted.expert_mlp.prepare(*weights), limit=10.0)
    prepared = own.expert_mlp.prepare(*weights)
    rows = own.expert_mlp.pack(Activations(rows), prepared)
    found = own.expert_mlp(rows, expert_ids, factor, prepared, limit=10.0)
    for part in (found, given):
        same(part.places < 0, expert_ids < 0)
        known = part.places[part.places >= 0]
        assert len(known.unique()) == len(known) == int((expert_ids >= 0).sum())
    close(*(part.values[part.places[expert_ids >= 0].long()] for part in (found, given)), 1.5e-2)
    none = own.expert_mlp(rows[:0], expert_ids[:0], factor[:0], prepared, limit=10.0)
    assert (none.places.shape, none.values.shape[1]) == ((0, 2), sizes.hidden)


@dataclass(slots=True, frozen=True)
class IndexCase:
    """Arguments of `IndexSelect` over several sequences in shuffled blocks."""

    query: Tensor
    weights: Tensor
    keys: Tensor
    block_table: Tensor
    starts: Tensor
    sequence: Tensor
    visible: Tensor


def index_case(bench: Bench, *, equal: bool = False) -> IndexCase:
    """Rows of three sequences, one of them padding that sees nothing; `equal`: all keys are equal, all scores tie."""
    sizes, per_block = bench.sizes, ENTRIES_PER_BLOCK
    rows = max(6, sizes.rows)
    blocks = -(-sizes.entries // per_block)
    table = (torch.randperm(3 * blocks, generator=bench.generator) + 1).view(3, blocks).to(bench.device)
    keys = bench.normal((3 * blocks + 1) * per_block, sizes.index_dim)
    starts = torch.tensor([0, rows // 3, rows - 1, rows], device=bench.device)
    sequence = torch.repeat_interleave(starts.diff())
    visible = sizes.entries - rows + torch.arange(rows, device=bench.device)
    visible[rows // 3 : rows // 3 + 2] = torch.tensor([3, 40], device=bench.device)
    visible[-1] = 0
    return IndexCase(
        query=bench.normal(rows, sizes.index_heads, sizes.index_dim),
        weights=bench.normal(rows, sizes.index_heads),
        keys=keys[:1].expand_as(keys).contiguous() if equal else keys,
        block_table=table,
        starts=starts,
        sequence=sequence,
        visible=visible,
    )


def run_index(
    bench: Bench, kernels: KernelSet, case: IndexCase, candidates: Tensor | None, rule: CandidateRule | None
) -> tuple[Tensor, Tensor | None]:
    """Entries and candidates of one implementation."""
    record = kernels.record_formats("index", bench.sizes.index_dim)
    keys = PagedRows(record.pack(case.keys), record, case.block_table, ENTRIES_PER_BLOCK)
    chosen = kernels.index_select(
        case.query, case.weights, keys, sequence_starts=case.starts, row_sequence=case.sequence,
        visible=case.visible, num_selected=bench.sizes.selected, candidates=candidates, rule=rule,
    )  # fmt: skip
    return chosen.entries, chosen.candidates


def check_index_select(bench: Bench) -> None:
    """Selections and candidate blocks, equal to the reference's; all-equal scores give the lowest entries."""
    num_blocks = 4 * bench.sizes.selected // 4
    rule = CandidateRule(num_blocks=max(3, num_blocks), block_size=4)
    case = index_case(bench)
    entries, kept = run_index(bench, bench.kernels, case, None, rule)
    wanted, wanted_kept = run_index(bench, bench.reference, case, None, rule)
    assert wanted_kept is not None
    assert kept is not None
    same(kept, wanted_kept)
    same(entries, wanted)
    same(run_index(bench, bench.kernels, case, kept, rule)[0], run_index(bench, bench.reference, case, kept, rule)[0])
    tied = index_case(bench, equal=True)
    entries, _ = run_index(bench, bench.kernels, tied, None, None)
    lowest = torch.arange(bench.sizes.selected, device=bench.device).expand_as(entries)
    same(entries, torch.where(lowest < tied.visible.unsqueeze(1), lowest, -1))
    tied.visible.zero_()
    entries, kept = run_index(bench, bench.kernels, tied, None, rule)
    assert kept is not None
    assert (entries == -1).all(), "padding rows select nothing"
    assert (kept == -1).all(), "padding rows keep nothing"
    assert (run_index(bench, bench.kernels, tied, kept, rule)[0] == -1).all()


def check_attention(bench: Bench) -> None:
    """Rows over ring, step and main records with gaps; window only; and a row without keys, which gives zeros.

    Once with rows wherever they are, once in one tensor, if they are equally long.
    """
    sizes = bench.sizes
    window_record = bench.kernels.record_formats("window", sizes.head_dim)
    main_record = bench.kernels.record_formats("main", sizes.head_dim)
    ring = window_record.pack(bench.normal(90, sizes.head_dim))
    step = window_record.pack(bench.normal(sizes.rows, sizes.head_dim))
    main = main_record.pack(bench.normal(700, sizes.head_dim))
    query = bench.normal(sizes.rows, sizes.heads, sizes.head_dim, scale=1.5)
    window_rows = bench.integers(-1, 90 + sizes.rows, sizes.rows, sizes.window)
    main_rows = bench.integers(-1, 700, sizes.rows, sizes.selected)
    window_rows[-1], main_rows[-1], main_rows[0] = -1, -1, -1
    sink = bench.normal(sizes.heads, dtype=torch.float32)
    lots = [(ring, step, main)]
    if window_record.num_bytes == main_record.num_bytes:
        step_first = torch.cat((step, main, ring, step))[len(step) :]
        main, ring, step = step_first.split([len(main), len(ring), len(step)])
        lots.append((ring, step, main))
    for (ring, step, main), with_main in itertools.product(lots, (True, False)):
        keys = {
            "ring": ring, "step_records": step, "window_rows": window_rows, "window_record": window_record,
            "main": main if with_main else None, "main_rows": main_rows if with_main else None,
        }  # fmt: skip
        rest = {"main_record": main_record if with_main else None, "sink": sink, "scale": sizes.head_dim**-0.5}
        own, wanted = (kernels.sparse_attention(query, **keys, **rest) for kernels in (bench.kernels, bench.reference))
        close(own, wanted, 5e-3)
        attend = bench.kernels.sparse_attention
        assert torch.equal(attend(query, **keys, **rest, located=attend.locate(**keys)), own)
        assert not own[-1].any(), "a row without keys must give zeros"


def check_sampling(bench: Bench) -> None:
    """Draws equal the reference's unless the two best are within float32 rounding of the noise; ties: the lower id."""
    rows, vocabulary = bench.sizes.rows, bench.sizes.vocabulary
    scores = bench.normal(rows, vocabulary, dtype=torch.float32, scale=2)
    scores[:, ::7] = -torch.inf
    seeds, positions = bench.integers(0, 2**62, rows), bench.integers(0, 2**40, rows)
    temperatures = torch.tensor([0.0, 1.0, 0.7], device=bench.device).repeat(rows)[:rows]
    scores[0, 3] = scores[0, 5] = 50.0
    own = bench.kernels.gumbel_argmax(scores, seeds, positions, temperatures, purpose=3)
    wanted = bench.reference.gumbel_argmax(scores, seeds, positions, temperatures, purpose=3)
    assert int((own != wanted).sum()) <= rows // 50
    assert torch.equal(own[::3], scores[::3].argmax(1))
    assert int(own[0]) == 3
    one = torch.full((1, vocabulary), -torch.inf, device=bench.device)
    one[0, vocabulary - 1] = 0.0
    bias = bench.normal(rows, vocabulary, dtype=torch.float32)
    block = scores[:, None].expand(-1, 3, -1).contiguous()  # of a block of drafts: rows that do not lie side by side
    for dtype in (torch.float32, torch.bfloat16):
        given = block.to(dtype)[:, 1], seeds, positions, temperatures
        own_draws, wanted = (
            kernels.gumbel_argmax(*given, purpose=3, bias=bias) for kernels in (bench.kernels, bench.reference)
        )
        assert int((own_draws != wanted).sum()) <= rows // 50
    for place, damage in enumerate((torch.nan, torch.inf)):
        broken = scores.clone()
        broken[1 + place, vocabulary // 2] = damage
        broken[0] = -torch.inf
        drawn = bench.kernels.gumbel_argmax(broken, seeds, positions, temperatures, purpose=3)
        assert (drawn < 0).nonzero().flatten().tolist() == [0, 1 + place]
        assert torch.equal(drawn[3:], own[3:])
    for temperature in temperatures[:2].split(1):
        drawn = bench.kernels.gumbel_argmax(one, seeds[:1], positions[:1], temperature, purpose=0)
        assert int(drawn) == vocabulary - 1


def check_batch_invariance(bench: Bench) -> None:
    """The first rows have the same bits alone, in a few, and in all rows."""
    sizes, kernels = bench.sizes, bench.kernels
    x, streams = bench.normal(sizes.rows, sizes.hidden), bench.normal(sizes.rows, 4, sizes.hidden)
    weight = kernels.linear.prepare(bench.normal(sizes.experts, sizes.hidden))
    quantised = kernels.quantized_linear.prepare(*fp8_matrix(bench, sizes.expert_width, sizes.hidden))
    matrix = fp8_matrix(bench, sizes.groups * 64, sizes.group_width)
    grouped = kernels.grouped_linear.prepare(*matrix, num_groups=sizes.groups)
    y = bench.normal(sizes.rows, sizes.groups, sizes.group_width)
    function = bench.normal(24, 4 * sizes.hidden, dtype=torch.float32, scale=(4 * sizes.hidden) ** -0.5)
    scale, base = torch.ones(3, device=bench.device), bench.normal(24, dtype=torch.float32)
    function = kernels.mix_coefficients.prepare(function)
    experts = kernels.expert_mlp.prepare(*fp4_experts(bench, 2))
    packed = kernels.expert_mlp.pack(Activations(x), experts)
    factor = bench.normal(sizes.rows, dtype=torch.float32)

    def results(num_rows: int) -> list[Tensor]:
        rows = slice(0, num_rows)
        mixes = kernels.mix_coefficients(
            streams[rows], function, scale, base, epsilon=1e-20, mix_epsilon=1e-6, num_iterations=20
        )
        done = kernels.expert_mlp(
            packed[rows],
            torch.ones_like(factor[rows, None], dtype=torch.int64),
            factor[rows, None],
            experts,
            limit=10.0,
        )
        return [
            kernels.linear(x[rows], weight, out_dtype=torch.float32),
            kernels.quantized_linear(x[rows], quantised),
            kernels.grouped_linear(y[rows], grouped),
            mixes.mix,
            done.values[done.places.flatten().long()],
        ]

    whole = results(sizes.rows)
    for num_rows in (1, 3, sizes.rows // 2):
        for part, full in zip(results(num_rows), whole, strict=True):
            same(part, full[:num_rows])


CHECKS: dict[str, Check] = {
    "records": check_records,
    "norm_and_rotation": check_norm_and_rotation,
    "open_streams": check_open_streams,
    "hyper_connection": check_hyper_connection,
    "engram": check_engram,
    "pair_compress": check_pair_compress,
    "routing": check_routing,
    "unusable_rows": check_unusable_rows,
    "linear": check_linear,
    "experts": check_experts,
    "index_select": check_index_select,
    "attention": check_attention,
    "sampling": check_sampling,
}
