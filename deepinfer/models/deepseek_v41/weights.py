"""Loads what one rank needs of a checkpoint into the typed tree of `weight_types`.

Formats are kept as released; promotions (router and head to float32, `wo_a` to bfloat16, ...) are the model's.
Everything is checked before the first byte of data is read: all names, dtypes and shapes, then the free memory. Then
the tree is made of empty tensors, and all of them are filled in one go, in the order of the files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from deepinfer.log import get_logger
from deepinfer.models.checkpoint_files import CheckpointFiles, FileRange, TensorEntry, open_checkpoint, raise_first
from deepinfer.models.checkpoint_reads import NodePlace, OnProgress, Read, read_ahead, read_all
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.engram_shards import rows_of_share
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

_LOGGER = get_logger("weights")


@dataclasses.dataclass(frozen=True, slots=True)
class TableShare:
    """Which rows of the n-gram tables a rank holds on its device: the `index`-th of `num_shares` equal runs."""

    index: int
    num_shares: int


def load_weights(
    directory: Path,
    config: ModelConfig,
    *,
    expert_ids: tuple[tuple[int, ...], ...],
    device: torch.device,
    draft: DraftShare | None = None,
    table_share: TableShare | None = None,
    free: FreeMemory | None = None,
    place: NodePlace | None = None,
    on_progress: OnProgress | None = None,
) -> Weights:
    """Return the weights of a rank that holds the logical experts `expert_ids[layer]` of each backbone layer.

    `draft` is its share of the draft stages, None to leave them out.
    `table_share`: its rows of the n-gram tables, on its device. None: all of them, as a memory map of the files, which
    all processes of a node share; they are read into the node's memory first if they fit.
    `place`: which of its group's ranks on this node it is; `free` replaces the measured free memory.
    Raises `CheckpointError` naming the first tensor that is missing, unexpected or of a wrong dtype or shape (draft
    stages included, loaded or not), and `ConfigError` when memory is too small.
    """
    assert len(expert_ids) == config.num_layers, (len(expert_ids), config.num_layers)
    place, free = place or NodePlace(), free or free_memory(device)
    files = open_checkpoint(directory)
    raise_first(directory, compare_tensors(files, tensor_table(config)))
    num_shares = None if table_share is None else table_share.num_shares
    need = memory_needed(config, expert_ids=expert_ids, draft=draft, num_table_shares=num_shares)
    check_memory(need, free, ranks_per_host=place.num_ranks)
    loader = WeightTree(files, config, device, table_share)
    weights = loader.tree(expert_ids, draft)
    # A node that has room for the whole checkpoint keeps it: a restart, or the other role's ranks, find it in memory.
    keeps_all = free.host_bytes > sum(entry.num_bytes for entry in files.entries.values())
    read_all(loader.reads, place=place, drops_own=not keeps_all, on_progress=on_progress)
    _read_tables_ahead(loader.tables, free_memory(device), place, on_progress)
    return weights


def _read_tables_ahead(
    tables: list[FileRange], free: FreeMemory, place: NodePlace, on_progress: OnProgress | None
) -> None:
    """Bring mapped tables into memory, where look-ups take nanoseconds and not the storage's time, if they fit."""
    size = sum(table.num_bytes for table in tables)
    if size > free.host_bytes:
        _LOGGER.warning(
            "the n-gram tables have %.0f GiB, %.0f GiB of host memory are free: look-ups will wait for the storage; "
            "use hosts with more memory, or ngram_tables: sharded",
            size / 2**30,
            free.host_bytes / 2**30,
        )
        return
    if tables:
        read_ahead(tables, place=place, on_progress=on_progress)


class WeightTree:
    """Builds the parts of the tree from empty tensors and notes what has to be read into each."""

    def __init__(
        self, files: CheckpointFiles, config: ModelConfig, device: torch.device, table_share: TableShare | None
    ) -> None:
        self.reads: list[Read] = []
        self.tables: list[FileRange] = []  # that are mapped
        self._files = files
        self._config = config
        self._device = device
        self._table_share = table_share

    def tree(self, expert_ids: tuple[tuple[int, ...], ...], draft: DraftShare | None) -> Weights:
        """All of a rank."""
        layers = tuple(self.layer(layer, ids) for layer, ids in enumerate(expert_ids))
        rings, drafting = (None, None) if draft is None else self.draft(draft)
        return Weights(
            embed=self.tensor("embed.weight"),
            head=self.tensor("head.weight"),
            norm=self.tensor("norm.weight"),
            layers=layers,
            draft_rings=rings,
            draft=drafting,
        )

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the rank's device; every rank reads it."""
        out = self._files.entry(name).empty(self._device)
        self._note(name, out, is_shared=True)
        return out

    def _note(self, name: str, out: torch.Tensor, *, is_shared: bool) -> None:
        self.reads.append(Read(name, self._files.entry(name).source, out, is_shared))

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
        shape = self._files.entry(f"{stem}.0.{name}").shape
        out = torch.empty((len(expert_ids), *shape), dtype=torch.uint8, device=self._device)
        for row, expert in enumerate(expert_ids):
            self._note(f"{stem}.{expert}.{name}", out[row], is_shared=False)
        return out

    def _engram(self, stem: str) -> EngramWeights:
        return EngramWeights(
            table=self._engram_table(f"{stem}.embed"),
            wkv=self._linear(f"{stem}.wkv"),
            q_weight=self.tensor(f"{stem}.q_weight"),
            k_weight=self.tensor(f"{stem}.k_weight"),
        )

    def _engram_table(self, stem: str) -> EngramTable:
        weight, scale = (self._files.entry(f"{stem}.{kind}") for kind in ("weight", "scale"))
        num_rows = weight.shape[0]
        if self._table_share is None:
            self.tables += [weight.source, scale.source]
            return EngramTable(self._files.map(weight.name), self._files.map(scale.name), 0, num_rows)
        first, end = rows_of_share(num_rows, self._table_share.index, self._table_share.num_shares)
        return EngramTable(self._rows(weight, first, end), self._rows(scale, first, end), first, num_rows)

    def _rows(self, entry: TensorEntry, first: int, end: int) -> torch.Tensor:
        out = entry.empty_rows(end - first, self._device)
        self.reads.append(Read(entry.name, entry.rows(first, end - first), out, is_shared=False))
        return out
