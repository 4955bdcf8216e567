"""Loads what one rank needs of a checkpoint into the typed tree of `weight_types`.

Formats are kept as released; promotions (router and head to float32, `wo_a` to bfloat16, ...) are the model's.
Everything is checked before the first byte of data is read: all names, dtypes and shapes, then the free memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from deepinfer.models.checkpoint_files import CheckpointFiles, open_checkpoint, raise_first
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.memory_need import FreeMemory, check_memory, free_memory, memory_needed
from deepinfer.models.deepseek_v41.tensor_check import compare_tensors
from deepinfer.models.deepseek_v41.tensor_table import DraftShare, tensor_table
from deepinfer.models.deepseek_v41.weight_types import (
    AttentionWeights,
    CompressorWeights,
    DraftRingWeights,
    DraftWeights,
    EngramTable,
    EngramWeights,
    Fp4Experts,
    HyperConnectionWeights,
    IndexerWeights,
    LayerWeights,
    MoeWeights,
    QuantizedLinear,
    SharedExpert,
    Weights,
)


def load_weights(
    directory: Path,
    config: ModelConfig,
    *,
    expert_ids: tuple[tuple[int, ...], ...],
    device: torch.device,
    draft: DraftShare | None = None,
    engram_share: tuple[int, int] = (0, 1),
    map_engram: bool = True,
    free: FreeMemory | None = None,
    ranks_per_host: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """Return the weights of a rank that holds the logical experts `expert_ids[layer]` of each backbone layer.

    `draft` is its share of the draft stages, None to leave them out.
    `engram_share` (i, n): this rank gets the i-th of n equal runs of rows of each n-gram table, always on the CPU;
    with `map_engram` as a memory map of the file, which all ranks of a host share, else read. `free` replaces the
    measured free memory. `on_progress(done, total)` is called after each layer.
    Raises `CheckpointError` naming the first tensor that is missing, unexpected or of a wrong dtype or shape (draft
    stages included, loaded or not), and `ConfigError` when memory is too small.
    """
    assert len(expert_ids) == config.num_layers, (len(expert_ids), config.num_layers)
    files = open_checkpoint(directory)
    raise_first(directory, compare_tensors(files, tensor_table(config)))
    need = memory_needed(
        config, expert_ids=expert_ids, draft=draft, num_engram_shares=engram_share[1], map_engram=map_engram
    )
    check_memory(need, free or free_memory(device), ranks_per_host=ranks_per_host)
    loader = _Loader(files, config, device, engram_share, map_engram)
    layers = []
    for layer, ids in enumerate(expert_ids):
        layers.append(loader.layer(layer, ids))
        if on_progress is not None:
            on_progress(layer + 1, config.num_layers)
    rings, drafting = (None, None) if draft is None else loader.draft(draft)
    return Weights(
        embed=loader.tensor("embed.weight"),
        head=loader.tensor("head.weight"),
        norm=loader.tensor("norm.weight"),
        layers=tuple(layers),
        draft_rings=rings,
        draft=drafting,
    )


class _Loader:
    """Reads tensors by name and builds the parts of the tree."""

    def __init__(
        self,
        files: CheckpointFiles,
        config: ModelConfig,
        device: torch.device,
        engram_share: tuple[int, int],
        map_engram: bool,
    ) -> None:
        self._files = files
        self._config = config
        self._device = device
        self._engram_share = engram_share
        self._map_engram = map_engram

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the rank's device."""
        return self._files.read(name).to(self._device)

    def layer(self, layer: int, expert_ids: tuple[int, ...]) -> LayerWeights:
        """All of one backbone layer."""
        return self._block(f"layers.{layer}", layer, expert_ids)

    def draft(self, share: DraftShare) -> tuple[DraftRingWeights, DraftWeights | None]:
        """What fills the draft rings and, unless `share` has no experts, the stages with their heads."""
        count = self._config.num_draft_stages
        assert count > 0, "the checkpoint has no draft stages"
        main_proj, main_norm = self._linear("mtp.0.main_proj"), self.tensor("mtp.0.main_norm.weight")
        if share.expert_ids is None:
            stems = [f"mtp.{stage}.attn" for stage in range(count)]
            wkv = tuple(self._linear(f"{stem}.wkv") for stem in stems)
            kv_norm = tuple(self.tensor(f"{stem}.kv_norm.weight") for stem in stems)
            return DraftRingWeights(main_proj, main_norm, wkv, kv_norm), None
        # Stage s is the layer behind the last one in the config's lists, where it is a plain window layer.
        stages = tuple(
            self._block(f"mtp.{stage}", self._config.num_layers + stage, share.expert_ids) for stage in range(count)
        )
        wkv = tuple(stage.attention.wkv for stage in stages)
        kv_norm = tuple(stage.attention.kv_norm for stage in stages)
        return DraftRingWeights(main_proj, main_norm, wkv, kv_norm), self._draft_heads(f"mtp.{count - 1}", stages)

    def _draft_heads(self, stem: str, stages: tuple[LayerWeights, ...]) -> DraftWeights:
        return DraftWeights(
            stages=stages,
            norm=self.tensor(f"{stem}.norm.weight"),
            markov_embed=self.tensor(f"{stem}.markov_head.embed.weight"),
            markov_head=self.tensor(f"{stem}.markov_head.head.weight"),
            confidence=self.tensor(f"{stem}.confidence_head.proj.weight"),
        )

    def _block(self, stem: str, layer: int, expert_ids: tuple[int, ...]) -> LayerWeights:
        return LayerWeights(
            attn_norm=self.tensor(f"{stem}.attn_norm.weight"),
            ffn_norm=self.tensor(f"{stem}.ffn_norm.weight"),
            hc_attn=self._hyper_connection(f"{stem}.hc_attn"),
            hc_ffn=self._hyper_connection(f"{stem}.hc_ffn"),
            attention=self._attention(f"{stem}.attn", layer),
            moe=self._moe(f"{stem}.ffn", expert_ids),
            engram=self._engram(f"{stem}.engram") if layer in self._config.engram_layer_ids else None,
        )

    def _linear(self, stem: str) -> QuantizedLinear:
        return QuantizedLinear(self.tensor(f"{stem}.weight"), self.tensor(f"{stem}.scale"))

    def _hyper_connection(self, stem: str) -> HyperConnectionWeights:
        return HyperConnectionWeights(
            fn=self.tensor(f"{stem}_fn"), base=self.tensor(f"{stem}_base"), scale=self.tensor(f"{stem}_scale")
        )

    def _attention(self, stem: str, layer: int) -> AttentionWeights:
        return AttentionWeights(
            wq_a=self._linear(f"{stem}.wq_a"),
            q_norm=self.tensor(f"{stem}.q_norm.weight"),
            wq_b=self._linear(f"{stem}.wq_b"),
            wkv=self._linear(f"{stem}.wkv"),
            kv_norm=self.tensor(f"{stem}.kv_norm.weight"),
            wo_a=self._linear(f"{stem}.wo_a"),
            wo_b=self._linear(f"{stem}.wo_b"),
            attn_sink=self.tensor(f"{stem}.attn_sink"),
            compressor=self._compressor(f"{stem}.compressor", layer),
            indexer=self._indexer(f"{stem}.indexer", layer),
        )

    def _compressor(self, stem: str, layer: int) -> CompressorWeights | None:
        if not self._config.is_kv_source(layer):
            return None
        has_gate = self._config.compress_ratio(layer) > 1
        return CompressorWeights(
            wkv=self.tensor(f"{stem}.wkv.weight"),
            norm=self.tensor(f"{stem}.norm.weight"),
            wgate=self.tensor(f"{stem}.wgate.weight") if has_gate else None,
        )

    def _indexer(self, stem: str, layer: int) -> IndexerWeights | None:
        if not self._config.is_index_source(layer):
            return None
        owns_keys = self._config.is_kv_source(layer)
        return IndexerWeights(
            wq_b=self._linear(f"{stem}.wq_b"),
            weights_proj=self.tensor(f"{stem}.weights_proj.weight"),
            wk=self.tensor(f"{stem}.wk.weight") if owns_keys else None,
            k_norm=self.tensor(f"{stem}.k_norm.weight") if owns_keys else None,
        )

    def _moe(self, stem: str, expert_ids: tuple[int, ...]) -> MoeWeights:
        shared = f"{stem}.shared_experts"
        return MoeWeights(
            gate_weight=self.tensor(f"{stem}.gate.weight"),
            gate_bias=self.tensor(f"{stem}.gate.bias"),
            experts=self._experts(f"{stem}.experts", expert_ids),
            shared=SharedExpert(
                self._linear(f"{shared}.w1"), self._linear(f"{shared}.w2"), self._linear(f"{shared}.w3")
            ),
        )

    def _experts(self, stem: str, expert_ids: tuple[int, ...]) -> Fp4Experts:
        return Fp4Experts(
            w1=self._stack(stem, "w1.weight", expert_ids),
            w1_scale=self._stack(stem, "w1.scale", expert_ids),
            w2=self._stack(stem, "w2.weight", expert_ids),
            w2_scale=self._stack(stem, "w2.scale", expert_ids),
            w3=self._stack(stem, "w3.weight", expert_ids),
            w3_scale=self._stack(stem, "w3.scale", expert_ids),
            expert_ids=expert_ids,
        )

    def _stack(self, stem: str, name: str, expert_ids: tuple[int, ...]) -> torch.Tensor:
        """One tensor of each expert, stacked: uint8 [E, ...]. Expert 0 exists always and gives the shape."""
        shape = self._files.entries[f"{stem}.0.{name}"].shape
        out = torch.empty((len(expert_ids), *shape), dtype=torch.uint8)
        for place, expert in enumerate(expert_ids):
            self._files.read_into(f"{stem}.{expert}.{name}", out[place])
        return out.to(self._device)

    def _engram(self, stem: str) -> EngramWeights:
        return EngramWeights(
            table=self._engram_table(f"{stem}.embed"),
            wkv=self._linear(f"{stem}.wkv"),
            q_weight=self.tensor(f"{stem}.q_weight"),
            k_weight=self.tensor(f"{stem}.k_weight"),
        )

    def _engram_table(self, stem: str) -> EngramTable:
        num_rows = self._files.entries[f"{stem}.weight"].shape[0]
        first, end = engram_rows(num_rows, self._engram_share)
        read = self._files.map_rows if self._map_engram else self._files.read_rows
        weight, scale = (read(f"{stem}.{kind}", first, end - first) for kind in ("weight", "scale"))
        return EngramTable(weight, scale, first_row=first, num_rows=num_rows)


def engram_rows(num_rows: int, share: tuple[int, int]) -> tuple[int, int]:
    """Return the half-open run of table rows of share (i, n); all runs but the last ones have equal length."""
    index, num_shares = share
    assert 0 <= index < num_shares, share
    length = -(-num_rows // num_shares)
    return min(index * length, num_rows), min((index + 1) * length, num_rows)
