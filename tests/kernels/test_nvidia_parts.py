"""Kernels of an NVIDIA GPU that are no ops by themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.op_cases import Bench, fp4_experts, released, small

from deepinfer.kernels.ops import REFERENCE_NUMERICS, Activations
from deepinfer.kernels.registry import select_kernels

pytest.importorskip("triton")
from support.nvidia_cases import CHECKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", CHECKS)
def test_parts(check: str) -> None:
    kernels = select_kernels("nvidia", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides={})
    CHECKS[check](Bench(kernels, small(), torch.device("cuda"), seed=1))


def test_unforeseen_tiles_of_fp8_experts_have_the_same_bits() -> None:
    """More tiles than expected, most of them one expert's: Triton multiplies the rest as DeepGEMM would."""
    kernels = select_kernels("nvidia", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides={})
    bench, own = Bench(kernels, released(), torch.device("cuda"), seed=1), kernels.expert_mlp
    prepared = own.prepare(*fp4_experts(bench, 4))
    packed = own.pack(Activations(bench.normal(2000, bench.sizes.hidden)), prepared)
    ids, factor = bench.integers(-1, 4, 2000, 2), bench.normal(2000, 2, dtype=torch.float32)
    ids[:1200, 0] = 2
    answers = []
    for expected in (10_000, 2000, 0):
        done = own(packed, ids, factor, prepared, limit=10.0, expected_copies=expected)
        answers.append(done.values[done.places[ids >= 0].long()])
    for answer in answers[1:]:
        assert torch.equal(answer.view(torch.int16), answers[0].view(torch.int16))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_recorded_look_up_reads_the_host(tmp_path: Path, mapped: bool) -> None:
    kernels = select_kernels("nvidia", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides={})
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (4000, 64), generator=generator, dtype=torch.uint8)
    scale = torch.randint(100, 140, (4000, 2), generator=generator, dtype=torch.uint8)
    if mapped:
        file = tmp_path / "table"
        file.write_bytes(bytes(8) + codes.numpy().tobytes())
        codes = torch.from_numpy(np.memmap(file, np.uint8, "c")[8:].reshape(4000, 64))
    table = codes.view(torch.float8_e4m3fn)
    rows = torch.zeros(5, 6, dtype=torch.int64, device="cuda")
    kernels.engram_lookup(rows, table, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.engram_lookup(rows, table, scale)
    rows.copy_(torch.randint(0, 4000, (5, 6), generator=generator))
    graph.replay()
    reference = select_kernels("cpu", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides={})
    assert torch.equal(found.cpu(), reference.engram_lookup(rows.cpu(), table, scale))


@pytest.mark.parametrize("growth", [0, 64_000])
def test_a_table_where_another_was_mapped_is_read_anew(tmp_path: Path, growth: int) -> None:
    """Each is mapped when the one before is gone, so it comes to lie where that lay, or over it."""
    reference = select_kernels("cpu", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides={})
    places = []
    for turn in range(1, 5):
        kernels = select_kernels("nvidia", numerics=REFERENCE_NUMERICS, batch_invariant=False, overrides={})
        file = tmp_path / f"table-{turn}"
        file.write_bytes(bytes([8 * turn]) * (640_000 + turn * growth))
        table = torch.from_numpy(np.memmap(file, np.uint8, "c").reshape(-1, 64)).view(torch.float8_e4m3fn)
        places.append(range(table.data_ptr(), table.data_ptr() + table.nbytes))
        scale = torch.full((len(table), 2), 127, dtype=torch.uint8)
        rows = torch.tensor([[0, len(table) - 1]])
        found = kernels.engram_lookup(rows.to("cuda"), table, scale)
        assert torch.equal(found.cpu(), reference.engram_lookup(rows, table, scale)), turn
        del kernels, table
    overlaps = [before.start < after.stop and after.start < before.stop for before, after in itertools.pairwise(places)]
    assert any(overlaps), "nothing was mapped where another lay, so nothing was shown"
