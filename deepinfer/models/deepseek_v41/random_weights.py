"""Random weights of one rank, made on its device: for benchmarks of shapes whose checkpoint is not at hand.

Every tensor has the released dtype and shape. Sizes are such that activations stay of size one through all layers,
and FP8 and FP4 scales vary from block to block. Answers are noise; times are those of the real model, whose n-gram
tables can be cut to a share of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch

from deepinfer.config import TablePlace
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.engram_constants import build_engram_constants
from deepinfer.models.deepseek_v41.tensor_table import DraftShare, TensorSpec, tensor_table
from deepinfer.models.deepseek_v41.weight_types import EngramTable, LayerWeights, Weights
from deepinfer.models.deepseek_v41.weights import WeightTree

_FP8_SIZE = 64.0  # standard deviation of FP8 codes: far from the largest value and from the subnormal ones
_FP4_SIZE = math.sqrt(68.5 / 8)  # of e2m1 codes drawn evenly
_NUM_TABLE_ROWS = 200_003  # of an n-gram table that are drawn before they repeat: a host takes long to draw
_HEAD_SIZE = 3.0  # standard deviation of the logits


def random_weights(
    config: ModelConfig,
    *,
    expert_ids: tuple[int, ...],
    draft: DraftShare | None,
    device: torch.device,
    tables: TablePlace,
) -> Weights:
    """Return the weights of a rank that holds the experts `expert_ids` of every layer.

    The n-gram tables are whole wherever they lie, so look-ups meet no other rank.

    Layers are made while they are taken, so that one that was prepared and dropped makes room for the next. Draws from
    torch's generator of the device.
    """
    maker = _Maker(config, device, tables)
    rings, drafting = (None, None) if draft is None else maker.draft(draft)
    return Weights(
        embed=maker.tensor("embed.weight"),
        head=maker.tensor("head.weight"),
        norm=maker.tensor("norm.weight"),
        layers=_layers(maker, config, expert_ids),
        draft_rings=rings,
        draft=drafting,
    )


def with_table_share(config: ModelConfig, *, num_shares: int) -> ModelConfig:
    """Return `config` with n-gram tables of about 1 / `num_shares` of their rows, and hashes that lead into them."""
    if not config.engram_layer_ids:
        return config
    vocab_size = max(2, config.engram_vocab_size // num_shares)
    constants = build_engram_constants(
        config.engram_layer_ids,
        vocab_size=vocab_size,
        num_heads=config.engram_n_heads,
        max_ngram_size=config.engram_max_ngram_size,
        num_classes=config.engram_compressed_vocab_size,
    )
    rows = tuple(layer.num_rows for layer in constants)
    return msgspec.structs.replace(config, engram_vocab_size=vocab_size, engram_num_embeddings=rows)


def with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Return `config` cut to its first `num_layers` layers; the draft taps the last ones. For short trials."""
    if num_layers >= config.num_layers:
        return config

    def kept(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(layer for layer in layers if layer < num_layers)

    num_taps = len(config.dspark_target_layer_ids)
    ratios = config.compress_ratios
    has_candidates = config.candidate_source_layer_id < num_layers
    return msgspec.structs.replace(
        config,
        num_hidden_layers=num_layers,
        compress_ratios=ratios[:num_layers] + ratios[config.num_layers :],
        kv_source_layer_ids=kept(config.kv_source_layer_ids),
        index_source_layer_ids=kept(config.index_source_layer_ids),
        candidate_source_layer_id=config.candidate_source_layer_id if has_candidates else -1,
        engram_layer_ids=kept(config.engram_layer_ids),
        engram_num_embeddings=config.engram_num_embeddings[: len(kept(config.engram_layer_ids))],
        dspark_target_layer_ids=tuple(range(num_layers - num_taps, num_layers)),
    )


def _layers(maker: _Maker, config: ModelConfig, expert_ids: tuple[int, ...]) -> Iterator[LayerWeights]:
    for layer in range(config.num_layers):
        yield maker.layer(layer, expert_ids)


class _Maker(WeightTree):
    """Builds the loader's tree from tensors that are drawn, not read."""

    def __init__(self, config: ModelConfig, device: torch.device, tables: TablePlace) -> None:
        self._config, self._device = config, device
        self._table_device = torch.device("cpu") if tables == "host" else device
        self._table = tensor_table(config)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the rank's device."""
        return _draw(self._table[name], self._weight_of(name), self._device)

    def _weight_of(self, name: str) -> TensorSpec:
        return self._table[name.removesuffix(".scale") + ".weight"] if name.endswith(".scale") else self._table[name]

    def _stack(self, stem: str, name: str, expert_ids: tuple[int, ...]) -> torch.Tensor:
        spec = self._table[f"{stem}.0.{name}"]
        stacked = msgspec.structs.replace(spec, shape=(len(expert_ids), *spec.shape))
        return _draw(stacked, self._weight_of(spec.name), self._device)

    def _engram_table(self, stem: str) -> EngramTable:
        spec = self._table[f"{stem}.weight"]
        num_rows, width = spec.shape
        num_drawn = min(num_rows, _NUM_TABLE_ROWS)
        # codes without NaN, since any of them may be looked up
        weight = torch.randint(0, 0x78, (num_drawn, width), dtype=torch.uint8, device=self._table_device)
        scale = _scale_bytes((num_drawn, *self._table[f"{stem}.scale"].shape[1:]), 2.0**-7, self._table_device)
        weight, scale = (part.repeat(-(-num_rows // num_drawn), 1)[:num_rows] for part in (weight, scale))
        return EngramTable(weight.view(torch.float8_e4m3fn), scale, first_row=0, num_rows=num_rows)


def _draw(spec: TensorSpec, weight: TensorSpec, device: torch.device) -> torch.Tensor:
    """`weight`: the tensor that `spec` scales, or itself."""
    if spec.dtype == "I8":
        return torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=device)
    if spec.dtype == "F8_E8M0":
        is_fp4 = weight.dtype == "I8"
        num_columns = weight.shape[-1] * (2 if is_fp4 else 1)
        return _scale_bytes(spec.shape, 1 / ((_FP4_SIZE if is_fp4 else _FP8_SIZE) * math.sqrt(num_columns)), device)
    noise = torch.randn(spec.shape, device=device, dtype=torch.bfloat16 if spec.dtype == "BF16" else torch.float32)
    if spec.dtype == "F8_E4M3":
        return noise.mul_(_FP8_SIZE).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return _plain(spec, noise)


def _scale_bytes(shape: tuple[int, ...], size: float, device: torch.device) -> torch.Tensor:
    """E8M0 bytes of the powers of two around `size`."""
    exponent = 127 + round(math.log2(size))
    return torch.randint(exponent, exponent + 2, shape, dtype=torch.uint8, device=device)


def _plain(spec: TensorSpec, noise: torch.Tensor) -> torch.Tensor:
    """An unquantised tensor from standard normal values of its dtype; roles are told by name."""
    last = spec.name.rsplit(".", 1)[-1]
    if last.endswith("_scale"):
        return torch.ones_like(noise)
    if last.endswith("_base"):
        return noise * 0.5
    if last == "bias":
        return noise * 0.1
    if last in ("q_weight", "k_weight"):
        return 1 + noise * 0.3
    if last == "attn_sink" or spec.name.endswith("embed.weight"):
        return noise
    if noise.ndim == 1:
        return 1 + noise * 0.1  # norms
    return noise * ((_HEAD_SIZE if spec.name == "head.weight" else 1.0) / math.sqrt(spec.shape[-1]))
