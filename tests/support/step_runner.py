"""Runs a model step by step as a rank would: one cache, block tables, token table, chunks of several sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.model_spec import ForwardInputs


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` [n] of the sequence in `slot`, at positions `start` .. `start + n - 1`."""

    slot: int
    start: int
    tokens: Tensor


class StepRunner:
    """Slots 1 .. `num_slots`; blocks are handed out in a shuffled order, so that a wrong block table shows."""

    def __init__(
        self, model: DeepseekV41, *, num_slots: int = 3, max_tokens: int = 384, tokens_per_block: int = 8
    ) -> None:
        self.model, self.device = model, model.device
        num_blocks = max_tokens // tokens_per_block
        shuffled = torch.randperm(num_blocks * num_slots, generator=torch.Generator().manual_seed(5))
        self.block_tables = (shuffled + 1).view(num_slots, num_blocks)
        self.token_table = torch.zeros(num_slots + 1, max_tokens, dtype=torch.int32, device=self.device)
        self.caches = model.allocate_caches(
            num_blocks={"global": num_blocks * num_slots + 1},
            num_slots=num_slots + 1,
            tokens_per_block=tokens_per_block,
            max_step_rows=40,  # less than some steps have
        )
        self.dispatcher = LocalDispatcher(model.config.n_routed_experts)

    def inputs(self, chunks: Sequence[Chunk], *, num_padding: int = 0) -> ForwardInputs:
        """Return the inputs of a step; padding rows form a last sequence in slot 0, all at position 0."""
        parts = list(chunks)
        if num_padding:
            parts.append(Chunk(0, 0, torch.full((num_padding,), 3)))
        lengths = torch.tensor([len(part.tokens) for part in parts], dtype=torch.int64)
        positions = [torch.arange(part.start, part.start + len(part.tokens)) for part in parts]
        for part in chunks:
            self.token_table[part.slot, part.start : part.start + len(part.tokens)] = part.tokens.int().to(self.device)
        num_rows = int(lengths.sum())
        is_padding = torch.arange(num_rows) >= num_rows - num_padding
        tables = [self.block_tables[part.slot - 1] if part.slot else self.block_tables[0] * 0 for part in parts]
        return ForwardInputs(
            token_ids=torch.cat([part.tokens for part in parts]).long().to(self.device),
            positions=torch.where(is_padding, 0, torch.cat(positions)).to(self.device),
            row_sequence=torch.repeat_interleave(lengths).to(self.device),
            sequence_slots=torch.tensor([part.slot for part in parts], device=self.device),
            sequence_starts=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(self.device),
            block_tables={"global": torch.stack(tables).to(self.device)},
            token_table=self.token_table,
            logit_rows=torch.arange(num_rows - num_padding, device=self.device),
            is_padding=is_padding.to(self.device),
            caches=self.caches,
            kernels=self.model.kernels,
            dispatcher=self.dispatcher,
        )

    def run(self, *chunks: Chunk, num_padding: int = 0) -> tuple[Tensor, ...]:
        """Run one step; return the logits [n, vocabulary] of each chunk's rows."""
        with torch.inference_mode():
            logits = self.model.forward(self.inputs(chunks, num_padding=num_padding)).logits
        return logits.split([len(chunk.tokens) for chunk in chunks])

    def run_in_chunks(self, slot: int, tokens: Tensor, sizes: Sequence[int], *, start: int = 0) -> Tensor:
        """Run `tokens` from position `start` on in steps of the given sizes; return all logits."""
        parts, done = [], 0
        for size in sizes:
            parts.extend(self.run(Chunk(slot, start + done, tokens[done : done + size])))
            done += size
        assert done == len(tokens), (done, len(tokens))
        return torch.cat(parts)

    def block_ids(self, slot: int, num_tokens: int) -> dict[str, Tensor]:
        """Blocks of the paged groups that hold `num_tokens` tokens of `slot`."""
        used = -(-num_tokens // self.caches.tokens_per_block)
        return {"global": self.block_tables[slot - 1, :used]}
