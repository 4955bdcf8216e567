"""Runs a golden model token by token and drafts after each pass, without slot table and scheduler."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from support.golden_case import mode_kernels
from support.step_runner import Chunk, StepRunner
from torch import Tensor

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.tensor_table import DraftShare
from deepinfer.models.deepseek_v41.token_map import read_token_map
from deepinfer.models.deepseek_v41.weights import load_weights
from deepinfer.models.model_spec import DraftBlock, DraftInputs, DraftNetwork


@functools.lru_cache(maxsize=2)
def draft_model(variant: Path, mode: str) -> DeepseekV41:
    """Return a variant's model with its draft stages, in the numerics of a mode."""
    return load_draft_model(variant, mode_kernels(mode))


def load_draft_model(variant: Path, kernels: KernelSet) -> DeepseekV41:
    """Load a variant's checkpoint with its draft stages on the CPU."""
    config = read_config(variant)
    weights = load_weights(
        variant,
        config,
        expert_ids=(tuple(range(config.n_routed_experts)),) * config.num_layers,
        device=torch.device("cpu"),
        draft=DraftShare(tuple(range(config.dspark_n_routed_experts))),
    )
    token_map = torch.from_numpy(read_token_map(variant, config)).long()
    return DeepseekV41(config, weights, token_map, kernels)


@dataclass
class Drafted:
    """Of one sequence: `tokens` [K], `logits` [K, V] with the Markov bias, `confidence` [K]."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


class DraftRunner:
    """Sequences of known tokens in slots 1 .. 3, and drafts behind them."""

    def __init__(self, model: DeepseekV41, *, max_tokens: int = 384) -> None:
        self.runner = StepRunner(model, max_tokens=max_tokens)
        self.caches = self.runner.caches
        self.lengths: dict[int, int] = {}
        self._experts = LocalDispatcher(model.config.dspark_n_routed_experts)
        assert model.draft_network is not None
        self.network: DraftNetwork = model.draft_network

    def run_tokens(self, slot: int, tokens: Tensor) -> Tensor:
        """Run `tokens` behind what the slot holds in one step; return their logits."""
        start = self.lengths.get(slot, 0)
        (logits,) = self.runner.run(Chunk(slot, start, tokens))
        self.lengths[slot] = start + len(tokens)
        return logits

    def block(self, *anchors: tuple[int, int], num_padding: int = 0, num_drafts: int | None = None) -> DraftBlock:
        """Run one draft pass for (slot, anchor token) pairs, followed by inert ones; None: whole blocks are wanted."""
        nothing = [0] * num_padding
        slots = torch.tensor([slot for slot, _ in anchors] + nothing, dtype=torch.int64)
        positions = [self.lengths[slot] for slot, _ in anchors] + nothing
        inputs = DraftInputs(
            anchor_ids=torch.tensor([token for _, token in anchors] + nothing, dtype=torch.int64),
            anchor_positions=torch.tensor(positions, dtype=torch.int64),
            slots=slots,
            num_drafts=num_drafts or self.network.block_size,
            caches=self.caches,
            dispatcher=self._experts,
        )
        with torch.inference_mode():
            return self.network.run(inputs)

    def draft_along(self, slot: int, tokens: Tensor) -> Drafted:
        """Draft greedily behind the anchor `tokens[0]`; biases are those of `tokens` [1 + K], not of the choice."""
        block = self.block((slot, int(tokens[0])))
        with torch.inference_mode():
            logits = block.logits[0] + self.network.markov_bias(tokens[:-1])
            confidence = self.network.confidence(block.hidden[0], tokens[:-1])
        return Drafted(logits.argmax(1), logits, confidence)
