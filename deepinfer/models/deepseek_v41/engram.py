"""N-gram memory layers: look-back over the token table, table rows, gated addition to the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.engram_constants import EngramConstants
from deepinfer.models.deepseek_v41.weight_types import EngramWeights
from deepinfer.models.model_spec import ForwardInputs


def engram_history(inputs: ForwardInputs, token_map: Tensor, *, length: int, pad_id: int) -> Tensor:
    """Compressed ids int64 [T, length] of each row's position and the ones before; `pad_id` before the sequence.

    `token_map` int64 [vocabulary]: token -> compressed id. Read from the token table, so chunks, drafts and hand-overs
    need no state of their own.
    """
    back = inputs.positions.unsqueeze(1) - torch.arange(length, device=inputs.positions.device)
    slots = inputs.sequence_slots[inputs.row_sequence].unsqueeze(1)
    tokens = inputs.token_table[slots, back.clamp_min(0)].long()
    return torch.where(back < 0, pad_id, token_map[tokens])


class Engram:
    """The memory of one layer."""

    def __init__(
        self, config: ModelConfig, weights: EngramWeights, constants: EngramConstants, kernels: KernelSet
    ) -> None:
        table = weights.table
        assert table.first_row == 0, f"the whole table is needed here, this share starts at {table.first_row}"
        assert len(table.weight) == table.num_rows, f"{len(table.weight)} of {table.num_rows} table rows are here"
        self.table, self.kernels, self.epsilon = table, kernels, config.rms_norm_eps
        self.memory_weight = kernels.quantized_linear.prepare(weights.wkv.weight, weights.wkv.scale)
        self.query_weight, self.key_weight = weights.q_weight, weights.k_weight
        device = weights.q_weight.device
        self.multipliers = torch.tensor(constants.multipliers, dtype=torch.int64, device=device)
        self.primes = torch.tensor(constants.primes, dtype=torch.int64, device=device)
        self.offsets = torch.tensor(constants.offsets, dtype=torch.int64, device=device)

    def __call__(self, streams: Tensor, history: Tensor) -> Tensor:
        """Return `streams` [T, M, D] with the memory of `history` [T, N] added."""
        kernels = self.kernels
        rows = kernels.engram_rows(history, self.multipliers, self.primes, self.offsets)
        found = kernels.engram_lookup(rows, self.table.weight, self.table.scale)
        memory = kernels.quantized_linear(found, self.memory_weight)
        return kernels.engram_gate(streams, memory, self.query_weight, self.key_weight, epsilon=self.epsilon)
