"""A rank of the model that stands for one of many in a benchmark: random weights, and caches that are full already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.config import TablePlace
from deepinfer.kernels.ops import RecordFormat
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.caches import Caches
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.random_weights import random_weights
from deepinfer.models.deepseek_v41.spec import DeepseekV41Spec
from deepinfer.models.deepseek_v41.tensor_table import DraftShare
from deepinfer.models.model_spec import DraftUse, KVPart

# Records drawn anew before they repeat. No power of two: two entries of one sequence should rarely be equal.
_NUM_RECORDS = 200_003


class RandomModel(DeepseekV41):
    """Runs as `DeepseekV41` does. Its caches hold random records everywhere, so a sequence of any length is there."""

    def allocate_caches(self, **sizes: Any) -> Caches:
        """See `model_spec.Model`; every record holds random values instead of zeros."""
        caches = super().allocate_caches(**sizes)
        _fill(caches)
        return caches

    def import_kv(
        self,
        caches: Any,  # noqa: ARG002  nothing but the parts is looked at
        *,
        slot: int,  # noqa: ARG002
        block_ids: dict[str, Tensor],  # noqa: ARG002
        num_tokens: int,  # noqa: ARG002
        parts: tuple[KVPart, ...],
    ) -> None:
        """Take an empty hand-over: what is in the caches counts as the sequence's."""
        assert not parts, "a benchmark hands over nothing"


@dataclass(slots=True, frozen=True)
class RandomSpec(DeepseekV41Spec):
    """See `model_spec.ModelSpec`; `load` reads no files."""

    name: str = "deepseek_v41 with random weights"

    def load(
        self,
        directory: Path,  # noqa: ARG002
        *,
        kernels: KernelSet,
        device: torch.device,
        rank: int,
        num_ranks: int,
        drafts: DraftUse,
        keep_tokens: int | None = None,
        tables: TablePlace = "host",
        **_where: object,
    ) -> RandomModel:
        """Make what rank `rank` of `num_ranks` would load; see `random_weights`."""

        def share(num_experts: int) -> tuple[int, ...]:
            return tuple(range(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks))

        draft = None
        if drafts != "off":
            draft = DraftShare(share(self.num_draft_experts) if drafts == "draft" else None)
        weights = random_weights(
            self.config, expert_ids=share(self.num_experts), draft=draft, device=device, tables=tables
        )
        classes = self.config.engram_compressed_vocab_size
        token_map = torch.randint(0, classes, (self.config.vocab_size,), device=device)
        return RandomModel(self.config, weights, token_map, kernels, keep_tokens=keep_tokens)


def _fill(caches: Caches) -> None:
    """Put random records into every pool and ring, and every window is whole."""
    layout = caches.layout
    _fill_pools((*caches.window, *caches.draft), layout.window_record)
    _fill_pools(tuple(caches.main.values()), layout.main_record)
    _fill_pools(tuple(caches.index.values()), layout.index_record)
    for pairs in caches.open_pairs.values():
        pairs.normal_()


def _fill_pools(pools: tuple[Tensor, ...], record: RecordFormat) -> None:
    if not pools:
        return
    num_records = min(_NUM_RECORDS, max(len(pool) for pool in pools))
    records = record.pack(torch.randn(num_records, record.width, dtype=torch.bfloat16, device=pools[0].device))
    for pool in pools:
        for first in range(0, len(pool), num_records):
            part = pool[first : first + num_records]
            part.copy_(records[: len(part)])
