"""What says it is batch-invariant: a row has the same bits alone, among others and in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from support.op_cases import Bench, Sizes, released, small
from support.row_cases import CASES, NUM_ROWS
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.kernels import registry
from deepinfer.kernels.ops import FP32_NUMERICS, REFERENCE_NUMERICS, Numerics
from deepinfer.kernels.registry import backend_names, load_backend, op_names, select_kernels

NUMERICS = {"reference": REFERENCE_NUMERICS, "fp32": FP32_NUMERICS}


def companies() -> Iterator[Tensor]:
    """Row numbers: alone, 1, 7, 63 and 255 others, in rising, falling and shuffled order."""
    generator = torch.Generator().manual_seed(3)
    for row in (0, 3, 77, NUM_ROWS - 1):
        yield torch.tensor([row])
    for size in (2, 3, 8, 17, 64):
        yield torch.randperm(NUM_ROWS, generator=generator)[:size]
        yield torch.randperm(NUM_ROWS, generator=generator)[:size].sort().values
    yield torch.arange(NUM_ROWS - 1, -1, -1)
    yield torch.randperm(NUM_ROWS, generator=generator)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether all bits are equal: unlike ==, tells zeros apart and knows NaN."""
    left, right = left.contiguous(), right.contiguous()
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def check(op: str, backend: str, platform: str, numerics: Numerics, sizes: Sizes) -> None:
    device = {"cpu": "cpu", "nvidia": "cuda"}[platform]
    entry = load_backend(backend, device).implementations.get(op)
    if entry is None or not entry.batch_invariant:
        pytest.skip(f"{backend} has no batch-invariant {op}")
    try:
        kernels = select_kernels(platform, numerics=numerics, batch_invariant=True, overrides={op: backend})
    except ConfigError:
        pytest.skip(f"{op} of {backend} does not do these numerics")
    run = CASES[op](Bench(kernels, sizes, torch.device(device), seed=7))
    everything = run(torch.arange(NUM_ROWS, device=device))
    assert all(len(part) == NUM_ROWS for part in everything)
    for rows in companies():
        rows = rows.to(device)
        for number, (part, whole) in enumerate(zip(run(rows), everything, strict=True)):
            assert same_bits(part, whole[rows]), f"output {number} of {op} changes with rows {rows[:8].tolist()}..."


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("backend", backend_names("cpu"))
@pytest.mark.parametrize("op", op_names())
def test_cpu(op: str, backend: str, numerics: str) -> None:
    check(op, backend, "cpu", NUMERICS[numerics], small())


@pytest.mark.slow
@pytest.mark.parametrize("op", op_names())
def test_cpu_at_the_widths_of_the_released_model(op: str) -> None:
    """Longer sums than those of the tiny model: there a library has more ways to cut them."""
    sizes = dataclasses.replace(
        small(), hidden=5120, head_dim=512, rotary=64, window=128, selected=512, index_dim=128, entries=2000,
        experts=384, expert_width=576, group_width=4096, vocabulary=8000,
    )  # fmt: skip
    check(op, "reference", "cpu", REFERENCE_NUMERICS, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [name for name in backend_names("nvidia") if name != "reference"])
@pytest.mark.parametrize("op", op_names())
def test_nvidia(op: str, backend: str) -> None:
    check(op, backend, "nvidia", REFERENCE_NUMERICS, released(NUM_ROWS))


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(op_names())


def test_a_product_that_sees_its_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself."""

    class ScaledProduct:
        def prepare(self, weight: Tensor) -> Tensor:
            return weight.float()

        def __call__(self, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
            scale = x.abs().max().float()  # one scale for all rows
            return (scale * ((x.float() / scale) @ weight.t())).to(out_dtype)

    entry = dataclasses.replace(
        load_backend("reference", "cpu").implementations["linear"], build=lambda _: ScaledProduct()
    )
    _replace(monkeypatch, entry)
    with pytest.raises(AssertionError, match="of linear changes"):
        check("linear", "reference", "cpu", REFERENCE_NUMERICS, small())


def test_the_mode_refuses_to_start_and_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = load_backend("reference", "cpu").implementations["sparse_attention"]
    _replace(monkeypatch, dataclasses.replace(entry, batch_invariant=False))
    with pytest.raises(ConfigError, match="no implementation of op 'sparse_attention' for batch-invariant"):
        select_kernels("cpu", numerics="reference", batch_invariant=True, overrides={})
    assert select_kernels("cpu", numerics="reference", batch_invariant=False, overrides={})


def _replace(monkeypatch: pytest.MonkeyPatch, entry: registry.Implementation) -> None:
    """Put `entry` in the place of the reference's implementation of its op."""

    def load(name: str, device_type: str) -> registry.Backend:
        backend = load_backend(name, device_type)
        return dataclasses.replace(backend, implementations={**backend.implementations, entry.op: entry})

    monkeypatch.setattr(registry, "load_backend", load)
