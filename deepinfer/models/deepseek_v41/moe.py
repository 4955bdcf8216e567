"""Mixture of experts: router, routed experts through the dispatcher, shared expert."""

from __future__ import annotations

from torch import Tensor

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.kernels.ops import Activations, ExpertSum, MixCoefficients
from deepinfer.kernels.registry import KernelSet
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.stacked import stack_rows
from deepinfer.models.deepseek_v41.weight_types import MoeWeights, QuantizedLinear
from deepinfer.platforms.side_stream import HeldWork, SideStream


class MixtureOfExperts:
    """The feed-forward part of one layer. The token's own rank adds the experts' rows in ascending expert id."""

    def __init__(
        self,
        config: ModelConfig,
        weights: MoeWeights,
        kernels: KernelSet,
        side: SideStream,
        *,
        num_chosen: int,
        few_rows: bool = False,
    ) -> None:
        """`num_chosen`: experts per token, which is another number in draft stages. `few_rows`: see `ExpertMLP`.

        `side` runs the shared expert beside the others.
        """

        def prepare(linear: QuantizedLinear) -> object:
            return kernels.quantized_linear.prepare(linear.weight, linear.scale)

        experts, shared = weights.experts, weights.shared
        self.kernels, self.side, self.limit = kernels, side, config.swiglu_limit
        self.num_chosen, self.scale = num_chosen, config.routed_scaling_factor
        self.router, self.bias = kernels.route_tokens.prepare(weights.gate_weight), weights.gate_bias
        self.experts = kernels.expert_mlp.prepare(
            experts.w1,
            experts.w1_scale,
            experts.w3,
            experts.w3_scale,
            experts.w2,
            experts.w2_scale,
            few_rows=few_rows,
        )
        self.shared_gate_up, self.shared_down = prepare(stack_rows(shared.w1, shared.w3)), prepare(shared.w2)

    def __call__(
        self, hidden: Activations, mixing: HeldWork[MixCoefficients], is_padding: Tensor, dispatcher: TokenDispatcher
    ) -> ExpertSum:
        """Return a sum [T, D] from the normalised input `hidden` [T, D]; a collective of the expert-parallel group.

        The small kernels between router and experts leave room for the shared expert and `mixing`.
        """
        kernels = self.kernels
        shared = self.side.hold(lambda: self._shared(hidden))
        shared.ready()
        mixing.ready()
        expert_ids, weights = kernels.route_tokens(
            hidden.values, self.router, self.bias, is_padding, num_chosen=self.num_chosen, scale=self.scale
        )
        shared.start()
        mixing.start()
        packed = kernels.expert_mlp.pack(hidden, self.experts)
        arrived = dispatcher.dispatch(packed, expert_ids, weights)
        rows = kernels.expert_mlp(
            arrived.rows,
            arrived.expert_ids,
            arrived.weights,
            self.experts,
            limit=self.limit,
            expected_copies=arrived.expected_copies,
        )
        return ExpertSum(dispatcher.combine(rows, arrived), shared.wait())

    def _shared(self, hidden: Activations) -> Tensor:
        linear = self.kernels.quantized_linear
        both = linear(hidden.values, self.shared_gate_up, cast=hidden.cast)
        return linear.after_swiglu(both, self.shared_down, limit=self.limit)
