"""Random tensors in the released formats, reproducible bit for bit from (seed, tensor name).

Sizes are chosen so that every mechanism shows in the logits: unit-size streams, gates and selections that depend on
the token, scale bytes that vary from block to block (a wrong block rule can't hide).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.models.deepseek_v41.config import QUANT_BLOCK
from deepinfer.models.deepseek_v41.tensor_table import TensorSpec

_FP8_MAX = 448.0
_FP4_MAX = 6.0
_FP4_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between the magnitudes 0 .5 1 1.5 2 3 4 6
_HEAD_SIZE = 3.0  # standard deviation of the logits
_QUIET_SIZE = 0.2  # factor of a control token's logits: a demonstration should rather show text

Array = npt.NDArray[np.float32]


def random_tensors(
    table: dict[str, TensorSpec], *, seed: int, quiet_token_ids: Iterable[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the table in its released dtype; E8M0 scales as `float8_e8m0fnu`, FP4 codes as int8.

    Rows `quiet_token_ids` of the output head are made small.
    """
    for name, spec in table.items():
        if spec.dtype == "F8_E8M0":
            continue  # made together with its weight
        if spec.dtype in ("F8_E4M3", "I8"):
            yield from _quantized(name, spec, table[_scale_name(name)], seed)
            continue
        values = _plain_values(name, spec, seed)
        if name == "head.weight":
            values[list(quiet_token_ids)] *= _QUIET_SIZE
        yield name, torch.from_numpy(values).to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)


def _scale_name(weight_name: str) -> str:
    return weight_name.removesuffix(".weight") + ".scale"


def _normal(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Standard normal values. `RandomState` is numpy's generator whose stream never changes between versions."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.RandomState(int.from_bytes(digest[:4], "little"))
    return generator.standard_normal(shape).astype(np.float32)


def _plain_values(name: str, spec: TensorSpec, seed: int) -> Array:
    """Values of an unquantised tensor, float32."""
    noise = _normal(name, spec.shape, seed)
    last = name.rsplit(".", 1)[-1]
    if last in ("hc_attn_scale", "hc_ffn_scale"):
        return np.ones_like(noise)
    if last in ("hc_attn_base", "hc_ffn_base"):
        return noise * np.float32(0.5)
    if last in ("bias", "bias_vl"):
        return noise * np.float32(0.1)
    if last in ("q_weight", "k_weight"):
        return 1 + noise * np.float32(0.3)
    if last == "attn_sink" or name.endswith("embed.weight"):
        return noise
    if noise.ndim == 1:
        return 1 + noise * np.float32(0.1)  # norms
    size = _HEAD_SIZE if name == "head.weight" else 1.0
    return noise * np.float32(size / np.sqrt(spec.shape[-1]))


def _quantized(name: str, spec: TensorSpec, scale: TensorSpec, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    is_fp4 = spec.dtype == "I8"
    rows, columns = spec.shape[0], spec.shape[1] * (2 if is_fp4 else 1)
    values = torch.from_numpy(_normal(name, (rows, columns), seed))
    if not name.endswith("embed.weight"):
        values = values / columns**0.5
    levels = torch.from_numpy(_normal(scale.name, scale.shape, seed)).round().clamp(-1, 1)  # blocks of other sizes
    block_rows = QUANT_BLOCK if scale.shape[0] != rows else 1
    values = values * _spread(torch.exp2(levels), block_rows, rows, columns)
    exponents = _block_exponents(values, block_rows, _FP4_MAX if is_fp4 else _FP8_MAX)
    scaled = values / _spread(torch.exp2(exponents.float()), block_rows, rows, columns)
    yield name, _pack_fp4(scaled) if is_fp4 else scaled.to(torch.float8_e4m3fn)
    yield scale.name, (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _block_exponents(values: torch.Tensor, block_rows: int, largest: float) -> torch.Tensor:
    """Smallest exponent per block that brings its values within +-`largest`: int32 [row blocks, column blocks]."""
    rows, columns = values.shape
    padding = (0, -columns % QUANT_BLOCK, 0, -rows % block_rows)
    padded = torch.nn.functional.pad(values.abs(), padding)
    blocks = padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // QUANT_BLOCK, QUANT_BLOCK)
    mantissa, exponent = torch.frexp(blocks.amax(dim=(1, 3)) / largest)  # value = mantissa * 2**exponent, in [0.5, 1)
    return exponent - (mantissa == 0.5).int()


def _spread(per_block: torch.Tensor, block_rows: int, rows: int, columns: int) -> torch.Tensor:
    """Repeat block values over the elements: [rows, columns]."""
    wide = per_block.repeat_interleave(block_rows, dim=0).repeat_interleave(QUANT_BLOCK, dim=1)
    return wide[:rows, :columns]


def _pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 codes, two a byte: int8 [rows, columns / 2], the even column in the low nibble."""
    codes = torch.bucketize(values.abs(), _FP4_MIDPOINTS).to(torch.uint8) | ((values < 0).to(torch.uint8) << 3)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int8)
