"""The contract of a model: what shared code knows about it, and what one forward pass is given.

A step is ragged: rows of many sequences lie flat, one row per (sequence, position), the rows of a sequence together
and ascending. Prefill chunks, decode rows and verification rows are the same thing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from deepinfer.config import TablePlace
from deepinfer.distributed.token_dispatcher import ExchangeShape, TokenDispatcher
from deepinfer.kernels.registry import KernelSet
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.models.checkpoint_reads import NodePlace, OnProgress

DraftUse = Literal["off", "keep", "draft"]  # nothing; keep what a drafting rank will need of a context; draft as well


@dataclass(slots=True, frozen=True)
class WeightBytes:
    """What one rank's weights take: `device` by part of the model, of which `experts` is the part of routed experts.

    `kept_row_experts`: of these, the bytes in layers that run only the kept rows of prompts that are cut short.
    `host_tables`: n-gram tables in host memory, once for all ranks of a node.
    """

    device: dict[str, int]
    experts: str
    kept_row_experts: int
    host_tables: int


@dataclass(slots=True, frozen=True)
class Prompts:
    """The first sequences of a step, which are pieces of prompts: one entry each, all known to the host.

    `num_tokens` of the whole prompt; `first_positions` and `num_rows` of this step's rows. `wants_logits`: logits of
    prompt rows are wanted in some step of this sequence, besides the last row's.
    """

    num_tokens: tuple[int, ...]
    first_positions: tuple[int, ...]
    num_rows: tuple[int, ...]
    wants_logits: tuple[bool, ...]


@dataclass(slots=True, frozen=True)
class ForwardInputs:
    """Everything a forward pass reads, besides weights. T rows, B sequences, S slots (slot 0 is for padding rows).

    `token_ids`, `positions` [T] int64; `row_sequence` [T] int64, non-decreasing, into the B sequences;
    `sequence_slots` [B] int64; `sequence_starts` [B + 1] int64, first row of each sequence, then T. Rows of a sequence
    are at consecutive positions; padding rows come last, at position 0, and may be counted to any last sequence.
    `block_tables`: per paged group [B, max_blocks] int64, unused entries 0 (the padding block);
    `token_table` [S, max_model_len] int32: all tokens of a slot by position, this step's input rows included
    (look-back of n-gram models); `logit_rows` [L] int64: the rows whose logits are wanted,
    None: all of them;
    `is_padding` [T] bool: inert rows; they are written to slot 0 / block 0 and sent to no expert.
    `caches` is the model's own object, from `Model.allocate_caches`.
    `prompts`: None when no row belongs to a prompt; a model may then run every row through all its layers.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_sequence: torch.Tensor
    sequence_slots: torch.Tensor
    sequence_starts: torch.Tensor
    block_tables: dict[str, torch.Tensor]
    token_table: torch.Tensor
    logit_rows: torch.Tensor | None
    is_padding: torch.Tensor
    caches: Any
    kernels: KernelSet
    dispatcher: TokenDispatcher
    prompts: Prompts | None = None


@dataclass(slots=True, frozen=True)
class ForwardOutput:
    """`logits` [L, vocab_size] float32, one row per entry of `logit_rows`."""

    logits: torch.Tensor


@dataclass(slots=True, frozen=True)
class DraftInputs:
    """What a draft pass reads, for B sequences of which every token before the anchor has run through the target.

    `anchor_ids`, `anchor_positions` [B] int64: the last committed token, which has not run yet; `slots` [B] int64: 0 is
    inert, at position 0, and sent to no expert. `num_drafts`: how many drafts of a block are wanted, the first ones.
    `dispatcher` serves the drafts' experts.
    """

    anchor_ids: torch.Tensor
    anchor_positions: torch.Tensor
    slots: torch.Tensor
    num_drafts: int
    caches: Any
    dispatcher: TokenDispatcher


@dataclass(slots=True, frozen=True)
class DraftBlock:
    """Of the K wanted drafts: `logits` [B, K, vocab_size] float32 or bf16: row i, with the bias of token i, tells token
    i + 1 (token 0: the anchor). `hidden` [B, K, D] model dtype: what `DraftNetwork.confidence` reads.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class DraftNetwork(Protocol):
    """Proposes a block of tokens behind the anchor: one pass for all rows, then token by token from left to right."""

    block_size: int
    num_experts: int

    def run(self, inputs: DraftInputs) -> DraftBlock:
        """Run the block; a collective when the experts are spread over ranks (B may be 0)."""
        ...

    def markov_bias(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [B, vocab_size], to be added to the logits of the row whose token is `token_ids` [B]."""
        ...

    def confidence(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [n]: log-odds that the draft of a row is accepted, given that all before it are.

        `hidden` [n, D] of the row, `token_ids` [n] its token; the draft itself is not looked at.
        """
        ...


@dataclass(slots=True, frozen=True)
class KVPart:
    """Records of one group in the wire format: `data` uint8 [nbytes], contiguous, on the CPU or on the device."""

    group: str
    first_position: int
    num_records: int
    data: torch.Tensor


class Model(Protocol):
    """A loaded model on one rank's device. `draft_network` is None unless it was loaded to draft."""

    @property
    def draft_network(self) -> DraftNetwork | None: ...

    @property
    def capturable(self) -> bool:
        """Whether a graph may hold `forward`: nothing in it, beside the dispatcher, waits for the host."""
        ...

    def allocate_caches(
        self, *, num_blocks: dict[str, int], num_slots: int, tokens_per_block: int, max_step_rows: int = 0
    ) -> Any:
        """Allocate zeroed cache tensors; both counts include the padding block 0 and the padding slot 0.

        `tokens_per_block` is the one that `ModelSpec.kv_groups` was asked with. `max_step_rows`: most rows of a step or
        of a draft pass; one with more runs, but slower.
        """
        ...

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Run all layers over the rows, writing their KV; a collective when the experts are spread over ranks."""
        ...

    def kv_bytes(self, caches: Any, num_tokens: int) -> int:
        """Return how many bytes the parts of a sequence of `num_tokens` tokens have together; asks no device."""
        ...

    def export_kv(
        self,
        caches: Any,
        *,
        slot: int,
        block_ids: dict[str, torch.Tensor],
        num_tokens: int,
        into: torch.Tensor | None = None,
    ) -> tuple[KVPart, ...]:
        """Return a copy of all that later positions of a sequence of `num_tokens` tokens will read.

        It lies in `into`, uint8 on the device, one part behind the other from its beginning on; None: in host memory.
        Its data are there when what has been launched so far has ended on the device.
        """
        ...

    def import_kv(
        self,
        caches: Any,
        *,
        slot: int,
        block_ids: dict[str, torch.Tensor],
        num_tokens: int,
        parts: tuple[KVPart, ...],
    ) -> None:
        """Write parts from `export_kv` of a rank with the same layout digest; bits survive the round trip."""
        ...


class ModelSpec(Protocol):
    """A model before its weights are loaded: sizes, groups, and how to build it for one rank."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_id: int
    num_experts: int
    draft_block_size: int  # most drafts of a pass; 0 when the checkpoint can't draft
    num_draft_experts: int

    def kv_groups(self, kernels: KernelSet, *, tokens_per_block: int, with_drafts: bool) -> tuple[KVGroup, ...]:
        """The cache groups in this kernel set's record formats."""
        ...

    def prompt_keep_tokens(self, wanted: int | None, *, max_draft_tokens: int) -> int:
        """How many tokens of a prompt run at full depth when prompts are cut short; None: as many as fit the model.

        Raises ConfigError when fewer than the windows need while drafts of that length may be undone.
        """
        ...

    def exchange_shapes(self, kernels: KernelSet, *, max_rows: int, tables: TablePlace) -> tuple[ExchangeShape, ...]:
        """What ranks exchange in a pass of at most `max_rows` rows each."""
        ...

    def weight_bytes(self, *, num_ranks: int, drafts: DraftUse, tables: TablePlace) -> WeightBytes:
        """What the largest of `num_ranks` ranks takes."""
        ...

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
    ) -> Model:
        """Load what rank `rank` of `num_ranks` expert-parallel ranks needs; raises CheckpointError.

        `keep_tokens`: of a prompt, only that many last tokens run at full depth; None: all. `place`: which of the
        group's ranks on its node it is; None: the only one. `tables`: see `config.PrefillConfig`.
        """
        ...
