"""Random cases of kernels of an NVIDIA GPU that are no ops by themselves; like `op_cases`, for GPU and interpreter."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.expert_layout_case import check_expert_layout
from support.flat_pool_case import check_flat_pool
from support.fp4_tiles_case import check_fp4_tiles
from support.fp8_tiles_case import check_fp8_tiles
from support.op_cases import Bench, Check, close, fp4_experts, fp8_matrix, same
from support.router_case import check_router
from torch import Tensor

from deepinfer.kernels.nvidia.cast_rows import unpack_rows
from deepinfer.kernels.nvidia.casts import cast_fp8, cast_rows, codes_and_scales
from deepinfer.kernels.nvidia.engram import gather_rows
from deepinfer.kernels.nvidia.fp8_weights import dequantise, recast_fp4, round_to_fp8
from deepinfer.kernels.nvidia.gemm import matmul
from deepinfer.kernels.nvidia.select import block_maxima, select_largest
from deepinfer.kernels.ops import Activations, CandidateRule, ExpertRows, ExpertSum, PagedRows, Selection
from deepinfer.kernels.reference.index_select import choose_entries
from deepinfer.kernels.reference.quantize import dequantize_fp4


def check_recast(bench: Bench) -> None:
    """FP8 weights of experts hold the FP4 values exactly; scales too far apart are noticed, except of zeros."""
    packed = bench.integers(0, 256, 2, 128, 128).to(torch.uint8)
    scale = bench.integers(110, 123, 2, 128, 8).to(torch.uint8)
    recast = recast_fp4(packed, scale)
    assert recast is not None
    for expert in range(2):
        wanted = dequantize_fp4(packed[expert], scale[expert])
        parts = type(recast)(recast.codes[expert], recast.scale[expert])
        same(dequantise(parts), wanted)
    scale[1, 5, 2] = 90
    assert recast_fp4(packed, scale) is None
    packed[1, 5, 32:48] = 0x80
    assert recast_fp4(packed, scale) is not None


def check_gathered_rows(bench: Bench) -> None:
    """Rows of a table read from front to back are where those read in any order are; some are asked for twice.

    A mapped table begins anywhere in its file, and one program reads more than one block of rows.
    """
    codes = bench.normal(900, 64, scale=20).to(torch.float8_e4m3fn)
    scale = bench.integers(100, 140, 900, 2).to(torch.uint8)
    rows = bench.integers(0, 900, 350, 6)
    wanted = bench.reference.engram_lookup(rows, codes, scale)
    for first in (0, 8, 4, 2, 1):
        moved = torch.cat((scale.new_zeros(first), codes.view(torch.uint8).flatten()))[first:].view(900, 64)
        table = moved.view(torch.float8_e4m3fn)
        for in_table_order in (False, True):
            same(gather_rows(rows, table, scale, dtype=wanted.dtype, in_table_order=in_table_order), wanted)
    same(gather_rows(rows[:0], codes, scale, dtype=wanted.dtype, in_table_order=True), wanted[:0])


def check_rough_weights(bench: Bench) -> None:
    """FP8 weights nearest to any numbers: those that FP8 has stay, each tile by its own power of two."""
    exact = bench.normal(192, 256).to(torch.float8_e4m3fn).float()
    exact[:128, :128] *= 2.0**-9
    exact[130, 200], exact[3, 3] = 448.0, 448.0 * 2.0**-9
    same(dequantise(round_to_fp8(exact)), exact)
    values = bench.normal(192, 256, scale=0.02)
    difference = (dequantise(round_to_fp8(values)) - values.float()).abs()
    assert bool((difference <= values.float().abs() * 2.0**-4 + 2.0**-16).all())


def check_cast(bench: Bench) -> None:
    """Codes and scales of 128 columns each, rounded to nearest even; the same packed and unpacked."""
    values = bench.normal(5, 384, scale=3)
    values[1] *= 1e-6
    values[2, :128] = 0
    codes, scales = cast_fp8(values)
    groups = values.float().unflatten(1, (3, 128))
    largest = groups.abs().amax(2).clamp_min(1e-4) / 448
    same(scales, torch.exp2(largest.log2().ceil()))
    same(codes.float(), (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).float().flatten(1))
    cast = cast_rows(values)
    assert cast.packed.shape == (5, 512)
    for found, wanted in zip(codes_and_scales(cast), (codes, scales), strict=True):
        same(found.float(), wanted.float())
    same(unpack_rows(cast.packed, width=384).float().unflatten(1, (3, 128)) / scales.unsqueeze(2),
         codes.float().unflatten(1, (3, 128)))  # fmt: skip
    assert len(unpack_rows(cast.packed[:0], width=384)) == 0


def check_casts_ahead(bench: Bench) -> None:
    """Casts of what a sublayer reads are those that its readers would make, and give their products the same bits."""
    _advanced(bench, 2176)
    sizes, kernels = replace(bench.sizes, hidden=256, expert_width=128), bench.kernels
    bench = Bench(kernels, sizes, bench.device, seed=bench.seed)
    hidden = _advanced(bench, sizes.hidden)
    plain = Activations(hidden.values)
    linear, experts = kernels.quantized_linear, kernels.expert_mlp
    weight = linear.prepare(*fp8_matrix(bench, 192, sizes.hidden))
    same(linear(hidden.values, weight, cast=hidden.cast), linear(plain.values, weight))
    ids, factor = bench.integers(-1, 2, sizes.rows, 2), bench.normal(sizes.rows, 2, dtype=torch.float32)
    for few_rows in (False, True):
        prepared = experts.prepare(*fp4_experts(bench, 2), few_rows=few_rows)
        answers = []
        for activations in (hidden, plain):
            done = experts(experts.pack(activations, prepared), ids, factor, prepared, limit=10.0)
            answers.append(done.values[done.places[ids >= 0].long()])
        same(*answers)


def _advanced(bench: Bench, width: int) -> Activations:
    """What the next sublayer reads, its cast compared with one made afterwards; other widths get none."""
    num_rows, num_chosen = bench.sizes.rows, bench.sizes.chosen
    streams, y = bench.wide(4 * num_rows, width).view(num_rows, 4, width), bench.normal(num_rows, width)
    post, pre = (bench.normal(num_rows, 4, dtype=torch.float32) for _ in range(2))
    mix, norm = bench.normal(num_rows, 4, 4, dtype=torch.float32), bench.normal(width)
    rows = ExpertRows(bench.normal(3 * num_rows, width), bench.integers(-1, 3 * num_rows, num_rows, num_chosen))
    for output in (y, ExpertSum(rows, y)):
        (updated, hidden), (plain_updated, plain) = (
            bench.kernels.advance_streams(streams, output, post, mix, pre, norm, epsilon=1e-6, with_cast=with_cast)
            for with_cast in (True, False)
        )
        same(updated, plain_updated)
        same(hidden.values, plain.values)
        assert hidden.cast is not None
        assert plain.cast is None
        wanted, used = cast_rows(plain.values), width + width // 128
        same(hidden.cast.packed[:, :used], wanted.packed[:, :used])
        same(hidden.cast.scales, wanted.scales)
    streams, y, norm = streams[..., :96].contiguous(), y[:, :96].contiguous(), norm[:96].contiguous()
    _, narrow = bench.kernels.advance_streams(streams, y, post, mix, pre, norm, epsilon=1e-6, with_cast=True)
    assert narrow.cast is None, "a group has 128 columns"
    return hidden


def check_uneven_experts(bench: Bench) -> None:
    """Experts whose scales lie too far apart for FP8: rows travel as those of the others do."""
    sizes, own = replace(bench.sizes, expert_width=128), bench.kernels.expert_mlp
    bench = Bench(bench.kernels, sizes, bench.device, seed=bench.seed)
    weights = fp4_experts(bench, 2)
    even = own.prepare(*weights)
    weights[1][0, 5, 2] -= 30
    uneven = own.prepare(*weights)
    activations = Activations(bench.normal(sizes.rows, sizes.hidden))
    packed, used = own.pack(activations, uneven), sizes.hidden + sizes.hidden // 128
    same(packed[:, :used], own.pack(activations, even)[:, :used])
    ids, factor = bench.integers(0, 2, sizes.rows, 1), bench.normal(sizes.rows, 1, dtype=torch.float32)
    found = own(packed, ids, factor, uneven, limit=10.0)
    reference = bench.reference.expert_mlp
    wanted = reference(activations.values, ids, factor, reference.prepare(*weights), limit=10.0)
    close(*(part.values[part.places.flatten().long()] for part in (found, wanted)), 1.5e-2)


def check_unexpected_copies(bench: Bench) -> None:
    """More or fewer copies than expected, to one expert out of three: the same bits, wherever the tiles end."""
    sizes, own = replace(bench.sizes, hidden=256, expert_width=128), bench.kernels.expert_mlp
    bench = Bench(bench.kernels, sizes, bench.device, seed=bench.seed)
    ids, factor = bench.integers(-1, 1, 90, 2) * 3 + 1, bench.normal(90, 2, dtype=torch.float32)
    ids[ids < 0] = -1
    activations = Activations(bench.normal(90, sizes.hidden))
    for few_rows in (False, True):
        prepared = own.prepare(*fp4_experts(bench, 3), few_rows=few_rows)
        packed, answers = own.pack(activations, prepared), []
        for expected in (None, 1, 60, 10_000):
            done = own(packed, ids, factor, prepared, limit=10.0, expected_copies=expected)
            answers.append(done.values[done.places[ids >= 0].long()])
        for answer in answers[1:]:
            same(answer, answers[0])
        nobody = own(packed, torch.full_like(ids, -1), factor, prepared, limit=10.0, expected_copies=1)
        assert bool((nobody.places < 0).all())


def check_select(bench: Bench) -> None:
    """Choices from wide rows: many ties, few usable values, rows that rise and fall, and of which little is visible."""
    num_selected, width = 8, 20011
    values = bench.normal(6, width)
    values[1] = values[1].round()
    values[2] = -torch.inf
    values[2, 7::4001] = 1.0
    values[3] = torch.arange(width, device=bench.device).to(torch.bfloat16)
    values[4] = -values[3]
    visible = torch.tensor([width, width, width, width - 3, width, 5], device=bench.device)
    hidden = torch.arange(width, device=bench.device) >= visible.unsqueeze(1)
    wanted = choose_entries(values.float().masked_fill(hidden, -torch.inf), num_selected)
    same(select_largest(values, num_selected, visible=visible), wanted)
    maxima = block_maxima(values, visible, unit=1, size=8, newest=False)
    same(select_largest(values, num_selected, visible=visible, maxima=maxima), wanted)
    whole = values[:, : width // 8 * 8].contiguous()
    same(select_largest(whole, num_selected, visible=visible.clamp_max(whole.shape[1])), choose_entries(
        whole.float().masked_fill(hidden[:, : whole.shape[1]], -torch.inf), num_selected))  # fmt: skip
    same(select_largest(values[:, :900], num_selected), choose_entries(values[:, :900].float(), num_selected))


def check_block_sizes(bench: Bench) -> None:
    """Selections, kept blocks and selections inside these don't depend on how many entries a cache block holds."""
    sizes, num_rows, num_entries = bench.sizes, 6, 5 * 64
    keys = bench.normal(2 * num_entries, sizes.index_dim)
    query = bench.normal(num_rows, sizes.index_heads, sizes.index_dim)
    weights, starts = bench.normal(num_rows, sizes.index_heads), torch.tensor([0, 4, num_rows], device=bench.device)
    visible = torch.tensor([300, 301, 302, 303, 33, 0], device=bench.device)
    record = bench.kernels.record_formats("index", sizes.index_dim)
    found = []
    for per_block in (16, 32, 64, 128):
        blocks = -(-num_entries // per_block)
        table = torch.randperm(2 * blocks, generator=bench.generator).view(2, blocks)
        pool = torch.zeros(2 * blocks * per_block, record.num_bytes, dtype=torch.uint8, device=bench.device)
        for sequence in range(2):
            places = (table[sequence].unsqueeze(1) * per_block + torch.arange(per_block)).flatten()[:num_entries]
            pool[places.to(bench.device)] = record.pack(keys[sequence * num_entries : (sequence + 1) * num_entries])
        held = PagedRows(pool, record, table.to(bench.device), per_block)

        def select(candidates: Tensor | None, held: PagedRows = held) -> Selection:
            return bench.kernels.index_select(
                query, weights, held, sequence_starts=starts,
                row_sequence=torch.tensor([0, 0, 0, 0, 1, 1], device=bench.device), visible=visible,
                num_selected=sizes.selected, candidates=candidates, rule=CandidateRule(num_blocks=11, block_size=8),
            )  # fmt: skip

        kept = select(None)
        found.append((kept.entries, kept.candidates, select(kept.candidates).entries))
    for results in found[1:]:
        for result, first in zip(results, found[0], strict=True):
            same(result, first)


def check_matmul(bench: Bench) -> None:
    """Products cut along K and not, with tiles that stick out at every side; a row has the same bits alone."""
    for num_groups, columns, depth in ((1, 96, 1024), (1, 1100, 512), (2, 300, 192), (3, 40, 512)):
        x = bench.normal(200, num_groups, depth)
        weight = bench.normal(num_groups, columns, depth, scale=depth**-0.5)
        wanted = torch.einsum("tgk,gnk->tgn", x.double(), weight.double()).flatten(1)
        found = matmul(x, weight, torch.float32)
        close(found, wanted, 1e-5)
        close(matmul(x, weight, torch.bfloat16), wanted, 3e-3)
        same(matmul(x[131:132], weight, torch.float32), found[131:132])
    x, weight = (bench.normal(*shape, 512, dtype=torch.float32) for shape in ((70, 1), (1, 3)))
    found = matmul(x, weight, torch.float32)
    close(found, torch.einsum("tgk,gnk->tgn", x.double(), weight.double()).flatten(1), 1e-6)
    same(matmul(x[33:34], weight, torch.float32), found[33:34])


CHECKS: dict[str, Check] = {
    "cast": check_cast,
    "casts_ahead": check_casts_ahead,
    "uneven_experts": check_uneven_experts,
    "unexpected_copies": check_unexpected_copies,
    "gathered_rows": check_gathered_rows,
    "recast": check_recast,
    "matmul": check_matmul,
    "rough_weights": check_rough_weights,
    "fp8_tiles": check_fp8_tiles,
    "fp4_tiles": check_fp4_tiles,
    "select": check_select,
    "flat_pool": check_flat_pool,
    "block_sizes": check_block_sizes,
    "expert_layout": check_expert_layout,
    "router": check_router,
}
