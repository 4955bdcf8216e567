"""What travels to experts is what their op made of a sublayer's input; the rest of the layer reads the input itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from support.golden_case import mode_kernels
from torch import Tensor

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.distributed.token_dispatcher import Dispatched
from deepinfer.kernels.ops import Activations, ExpertRows
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.moe import MixtureOfExperts
from deepinfer.models.deepseek_v41.random_weights import random_weights
from deepinfer.platforms.side_stream import open_side_streams

W16 = Path(__file__).parents[1] / "golden" / "w16"


class _AsBytes:
    """Experts that want rows as bytes with something behind them."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def prepare(self, *weights: Tensor, few_rows: bool = False) -> Any:
        return self._own.prepare(*weights, few_rows=few_rows)

    def pack(self, activations: Activations, experts: Any) -> Tensor:
        values = self._own.pack(activations, experts)
        return torch.nn.functional.pad(values.view(torch.uint8), (0, 3), value=7)

    def __call__(self, rows: Tensor, *rest: Any, **others: Any) -> ExpertRows:
        assert (rows[:, -3:] == 7).all()
        return self._own(rows[:, :-3].contiguous().view(torch.bfloat16), *rest, **others)


class _Watching(LocalDispatcher):
    """Notes what is sent."""

    def dispatch(self, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        self.sent = rows
        return super().dispatch(rows, expert_ids, weights)


def test_rows_travel_as_their_experts_pack_them() -> None:
    config, kernels = read_config(W16), mode_kernels("ref")
    count = config.n_routed_experts
    cpu = torch.device("cpu")
    loaded = random_weights(config, expert_ids=tuple(range(count)), draft=None, device=cpu, tables="host")
    moe = next(iter(loaded.layers)).moe
    hidden = Activations(torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16())
    sides, results = open_side_streams(cpu), []
    for own in (kernels, dataclasses.replace(kernels, expert_mlp=_AsBytes(kernels.expert_mlp))):
        experts = MixtureOfExperts(config, moe, own, sides.branch, num_chosen=config.num_experts_per_tok)
        dispatcher = _Watching(count)
        total = experts(hidden, sides.mixing.hold(lambda: None), torch.zeros(5, dtype=torch.bool), dispatcher)
        results.append((dispatcher.sent, own.combine_experts(total.rows, total.shared)))
    (plain, wanted), (packed, found) = results
    assert plain is hidden.values
    assert (packed.dtype, packed.shape) == (torch.uint8, (5, 2 * config.hidden_size + 3))
    assert torch.equal(found, wanted)
