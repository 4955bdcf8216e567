"""Number formats against tables and brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.ops import FP32_NUMERICS, REFERENCE_NUMERICS, RecordKind
from deepinfer.kernels.reference import quantize
from deepinfer.kernels.reference.cache import RecordFormats

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def wide_values(rows: int, width: int) -> Tensor:
    """Rows over many magnitudes, with an all-zero group, a tiny and a huge one."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, width, generator=generator) * torch.logspace(-7, 3.4, rows).unsqueeze(1)
    values[0, :32], values[1, :32], values[2, :32] = 0.0, 1e-6, 2600.0
    return values.bfloat16()


def test_e8m0_covers_all_bytes() -> None:
    values = quantize.decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert torch.isnan(values[255])


@pytest.mark.parametrize(("value", "power"), [(1.0, 1.0), (1.0000001, 2.0), (0.75, 1.0), (2.0**-22, 2.0**-22)])
def test_powers_of_two_are_rounded_up(value: float, power: float) -> None:
    assert quantize.round_up_to_power_of_two(torch.tensor([value])).item() == power


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.25, 0),
        (0.26, 1),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (5.1, 7),
        (9.0, 7),
        (-0.0, 8),
    ],
)
def test_e2m1_ties_go_to_the_even_code(value: float, code: int) -> None:
    row = torch.zeros(32)
    row[0], row[1] = value, 6.0  # scale 1
    codes, scale = quantize.quantize_fp4_index(row.clamp(-6, 6) if value <= 6 else row * 1.0)
    if value <= 6:
        assert scale.item() == 127
        assert int(codes[0]) & 0xF == code
        assert int(codes[0]) >> 4 == 7
    else:
        assert quantize.dequantize_fp4(codes, scale)[0] == 8.0


def test_fp8_rows_are_the_nearest_codes() -> None:
    x = wide_values(40, 64)
    codes, scale = quantize.quantize_fp8(x)
    factor = quantize.decode_e8m0(scale)
    largest = x.float().unflatten(1, (-1, 32)).abs().amax(2).clamp_min(1e-4)
    assert bool((factor * 448 >= largest * (1 - 2**-22)).all())
    assert bool((factor * 224 < largest).all())
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[torch.isfinite(every)]
    scaled = x.float().unflatten(1, (-1, 32)) / factor.unsqueeze(2)
    error = (codes.float().unflatten(1, (-1, 32)) - scaled).abs()
    assert torch.equal(error, (scaled.unsqueeze(-1) - every).abs().amin(-1))
    assert torch.equal(quantize.dequantize_fp8(codes, scale), quantize.round_fp8(x))


def test_fp4_main_scale_is_an_e4m3_quotient() -> None:
    x = wide_values(40, 64)
    codes, scale = quantize.quantize_fp4_main(x)
    groups = x.float().unflatten(1, (-1, 16))
    wanted = (groups.abs().amax(2).clamp_min(6 * 2.0**-9) / 6).clamp_max(448).to(torch.float8_e4m3fn)
    assert torch.equal(scale.view(torch.float8_e4m3fn).float(), wanted.float())
    assert wanted[0, 0].float() == 2.0**-9
    grid = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    scaled = (groups / wanted.float().unsqueeze(2)).clamp(-6, 6)
    kept = quantize.dequantize_fp4_main(codes, scale).unflatten(1, (-1, 16)) / wanted.float().unsqueeze(2)
    assert torch.equal((kept - scaled).abs(), (scaled.unsqueeze(-1) - grid).abs().amin(-1))


def test_fp4_even_columns_lie_in_low_nibbles() -> None:
    packed = torch.tensor([[0x21] + [0] * 15], dtype=torch.uint8)
    values = quantize.dequantize_fp4(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert values[0, :3].tolist() == [1.0, 2.0, 0.0]


def test_fp8_tiles_have_one_scale_per_32_by_32() -> None:
    weight = torch.ones(40, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = quantize.dequantize_fp8_tiles(weight, scale)
    assert values.shape == (40, 64)
    assert [values[0, 0], values[31, 32], values[32, 31], values[39, 63]] == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(("kind", "width", "num_bytes"), [("window", 512, 528), ("main", 512, 288), ("index", 128, 68)])
def test_packed_records_keep_every_bit_of_the_rounded_values(kind: RecordKind, width: int, num_bytes: int) -> None:
    record = RecordFormats(REFERENCE_NUMERICS)(kind, width)
    assert record.num_bytes == num_bytes
    values = record.unpack(record.pack(wide_values(40, width)))
    assert torch.equal(values.bfloat16().float(), values)
    if kind != "main":  # main scales are no powers of two: rounding a rounded row again may move it
        assert torch.equal(record.unpack(record.pack(values)), values)


def test_raw_records_keep_the_values() -> None:
    record = RecordFormats(FP32_NUMERICS)("window", 64)
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    assert record.num_bytes == 256
    assert torch.equal(record.unpack(record.pack(values)), values)
