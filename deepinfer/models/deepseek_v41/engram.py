"""N-gram memory layers: table rows, gated addition to the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.engram_constants import EngramConstants
from deepinfer.models.deepseek_v41.engram_shards import fetch_rows
from deepinfer.models.deepseek_v41.weight_types import EngramWeights


class Engram:
    """The memory of one layer. `capturable`: whether a graph may hold it, as far as its table is concerned."""

    def __init__(
        self, config: ModelConfig, weights: EngramWeights, constants: EngramConstants, kernels: KernelSet
    ) -> None:
        self.table, self.kernels, self.epsilon = weights.table, kernels, config.rms_norm_eps
        self.num_experts = config.n_routed_experts
        self.memory_weight = kernels.quantized_linear.prepare(weights.wkv.weight, weights.wkv.scale)
        self.query_weight, self.key_weight = weights.q_weight, weights.k_weight
        device = weights.q_weight.device
        # what a share of a table lacks comes through the dispatcher, which says for itself whether a graph holds it
        self.capturable = self.table.is_share or kernels.engram_lookup.capturable(
            self.table.weight, self.table.scale, device=device
        )
        self.multipliers = torch.tensor(constants.multipliers, dtype=torch.int64, device=device)
        self.primes = torch.tensor(constants.primes, dtype=torch.int64, device=device)
        self.offsets = torch.tensor(constants.offsets, dtype=torch.int64, device=device)

    def __call__(self, streams: Tensor, memory: Tensor) -> Tensor:
        """Return `streams` [T, M, D] with the `memory` of their rows added."""
        return self.kernels.engram_gate(streams, memory, self.query_weight, self.key_weight, epsilon=self.epsilon)

    def memory(self, history: Tensor, dispatcher: TokenDispatcher) -> Tensor:
        """Return [T, (M + 1) * D] of `history` [T, N], M keys and the value; a collective when tables are spread."""
        kernels = self.kernels
        rows = kernels.engram_rows(history, self.multipliers, self.primes, self.offsets)
        return kernels.quantized_linear(self.look_up(rows, dispatcher), self.memory_weight)

    def look_up(self, rows: Tensor, dispatcher: TokenDispatcher) -> Tensor:
        """Return the table's rows `rows` [T, R] side by side: [T, R * width] model dtype."""
        table = self.table
        if not table.is_share:
            return self.kernels.engram_lookup(rows, table.weight, table.scale)
        codes, scale = fetch_rows(rows.flatten(), table, dispatcher, num_experts=self.num_experts)
        return self.kernels.engram_lookup(torch.arange(rows.numel(), device=rows.device).view_as(rows), codes, scale)
