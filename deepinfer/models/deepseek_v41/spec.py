"""The `ModelSpec` of DeepSeek-V4.1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.config import TablePlace
from deepinfer.distributed.token_dispatcher import ExchangeShape
from deepinfer.kernels.registry import KernelSet
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.models.checkpoint_reads import NodePlace, OnProgress
from deepinfer.models.deepseek_v41.caches import cache_groups, cache_layout
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.engram_shards import answer_bytes
from deepinfer.models.deepseek_v41.memory_need import memory_needed, table_bytes
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.replay import prompt_keep_tokens
from deepinfer.models.deepseek_v41.tensor_table import DraftShare, Part
from deepinfer.models.deepseek_v41.token_map import read_token_map
from deepinfer.models.deepseek_v41.weights import TableShare, load_weights
from deepinfer.models.model_spec import DraftUse, WeightBytes


@dataclass(slots=True, frozen=True)
class DeepseekV41Spec:
    """See `model_spec.ModelSpec`."""

    config: ModelConfig
    name: str = "deepseek_v41"

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self.config.max_position_embeddings

    @property
    def eos_token_id(self) -> int:
        """Token that ends a sequence."""
        return self.config.eos_token_id

    @property
    def num_experts(self) -> int:
        """Logical routed experts of each layer."""
        return self.config.n_routed_experts

    @property
    def draft_block_size(self) -> int:
        """Most drafts of a pass; 0 when the checkpoint has no draft stages."""
        return self.config.dspark_block_size if self.config.num_draft_stages else 0

    @property
    def num_draft_experts(self) -> int:
        """Logical routed experts of each draft stage."""
        return self.config.dspark_n_routed_experts

    def kv_groups(self, kernels: KernelSet, *, tokens_per_block: int, with_drafts: bool) -> tuple[KVGroup, ...]:
        """See `model_spec.ModelSpec`; `tokens_per_block` is even."""
        layout = cache_layout(self.config, kernels, with_drafts=with_drafts)
        return cache_groups(layout, tokens_per_block=tokens_per_block)

    def prompt_keep_tokens(self, wanted: int | None, *, max_draft_tokens: int) -> int:
        """See `model_spec.ModelSpec`; by default window + 12."""
        return prompt_keep_tokens(self.config, wanted, max_draft_tokens=max_draft_tokens)

    def exchange_shapes(self, kernels: KernelSet, *, max_rows: int, tables: TablePlace) -> tuple[ExchangeShape, ...]:
        """See `model_spec.ModelSpec`: rows for experts, and the numbers of table rows that lie elsewhere."""
        config = self.config
        chosen = {config.num_experts_per_tok}
        if config.num_draft_stages:
            chosen.add(config.dspark_num_experts_per_tok)
        row_bytes = config.hidden_size * kernels.numerics.dtype.itemsize
        shapes = [ExchangeShape(columns, row_bytes, row_bytes, max_rows) for columns in sorted(chosen)]
        if tables == "sharded":
            max_lookups = max_rows * config.num_engram_rows_per_token
            shapes.append(ExchangeShape(1, torch.int64.itemsize, answer_bytes(config.engram_head_dim), max_lookups))
        return tuple(shapes)

    def weight_bytes(self, *, num_ranks: int, drafts: DraftUse, tables: TablePlace) -> WeightBytes:
        """See `model_spec.ModelSpec`."""

        def largest(num_experts: int) -> tuple[int, ...]:
            return tuple(range(-(-num_experts // num_ranks)))

        config, expert_ids = self.config, largest(self.num_experts)
        need = memory_needed(
            config,
            expert_ids=(expert_ids,) * config.num_layers,
            draft=_draft_share(drafts, largest(self.num_draft_experts)),
            num_table_shares=num_ranks if tables == "sharded" else None,
        )
        encoder = ((),) * config.first_decoder_layer
        decoder = (expert_ids,) * (config.num_layers - config.first_decoder_layer)
        return WeightBytes(
            device=need.weights,
            experts=Part.ROUTED_EXPERT,
            kept_row_experts=memory_needed(config, expert_ids=encoder + decoder).weights.get(Part.ROUTED_EXPERT, 0),
            host_tables=table_bytes(config) if tables == "host" else 0,
        )

    def load(
        self,
        directory: Path,
        *,
        kernels: KernelSet,
        device: torch.device,
        rank: int,
        num_ranks: int,
        drafts: DraftUse,
        keep_tokens: int | None = None,
        tables: TablePlace = "host",
        place: NodePlace | None = None,
        on_progress: OnProgress | None = None,
    ) -> DeepseekV41:
        """See `model_spec.ModelSpec`; rank r holds the experts r * E // R .. (r + 1) * E // R - 1 of every layer."""

        def share(num_experts: int) -> tuple[int, ...]:
            return tuple(range(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks))

        weights = load_weights(
            directory,
            self.config,
            expert_ids=(share(self.num_experts),) * self.config.num_layers,
            device=device,
            draft=_draft_share(drafts, share(self.num_draft_experts)),
            table_share=TableShare(rank, num_ranks) if tables == "sharded" else None,
            place=place,
            on_progress=on_progress,
        )
        token_map = torch.from_numpy(read_token_map(directory, self.config)).to(device, torch.int64)
        return DeepseekV41(self.config, weights, token_map, kernels, keep_tokens=keep_tokens)


def build_spec(directory: Path) -> DeepseekV41Spec:
    """Read `config.json`; raises `ConfigError` naming the field that is wrong."""
    return DeepseekV41Spec(read_config(directory))


def build_released_spec() -> DeepseekV41Spec:
    """Return the spec of the released model, whose files need not be there."""
    return DeepseekV41Spec(released_config())


def _draft_share(drafts: DraftUse, expert_ids: tuple[int, ...]) -> DraftShare | None:
    return None if drafts == "off" else DraftShare(expert_ids if drafts == "draft" else None)
