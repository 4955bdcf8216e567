"""N-gram memory: hashed rows, table look-up and the gate that adds the memory to the streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import Numerics
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.elementwise import sigmoid
from deepinfer.kernels.reference.quantize import dequantize_fp8


@dataclass(slots=True, frozen=True)
class EngramRows:
    """`ops.EngramRows`."""

    def __call__(self, history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
        products = history * multipliers
        mixed = products[:, 0]
        rows = []
        for order in range(primes.shape[0]):
            mixed = mixed ^ products[:, order + 1]
            rows.append(mixed.unsqueeze(1) % primes[order] + offsets[order])
        return torch.cat(rows, dim=1)


@dataclass(slots=True, frozen=True)
class EngramLookup:
    """`ops.EngramLookup`; a table in host memory is read by the host, also for rows on a GPU."""

    numerics: Numerics

    def capturable(self, table: Tensor, scale: Tensor, *, device: torch.device) -> bool:
        """See `ops.EngramLookup`."""
        return table.device == scale.device == device

    def __call__(self, rows: Tensor, table: Tensor, scale: Tensor) -> Tensor:
        flat = rows.flatten().to(table.device)
        # gathered as bytes: indexing has no FP8 kernel everywhere
        codes = table.view(torch.uint8)[flat].view(torch.float8_e4m3fn)
        values = dequantize_fp8(codes, scale[flat])
        return values.to(self.numerics.dtype).view(rows.shape[0], rows.shape[1] * table.shape[1]).to(rows.device)


@dataclass(slots=True, frozen=True)
class EngramGate:
    """`ops.EngramGate`."""

    numerics: Numerics

    def __call__(
        self, streams: Tensor, memory: Tensor, query_weight: Tensor, key_weight: Tensor, *, epsilon: float
    ) -> Tensor:
        gate = gate_values(streams, memory, query_weight, key_weight, epsilon=epsilon)
        value = memory[:, -streams.shape[2] :].float()
        return (streams.float() + gate.unsqueeze(-1) * value.unsqueeze(1)).to(self.numerics.dtype)


def gate_values(streams: Tensor, memory: Tensor, query_weight: Tensor, key_weight: Tensor, *, epsilon: float) -> Tensor:
    """Return the gates float32 [T, M]."""
    _, num_streams, hidden = streams.shape
    x = streams.float()
    key = memory[:, : num_streams * hidden].float().unflatten(1, (num_streams, hidden))
    dot = (x * (query_weight.float() * key_weight.float()) * key).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + epsilon) * torch.rsqrt(key.square().mean(-1) + epsilon)
    dot = dot * hidden**-0.5
    return sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp_min(1e-6)), dot))


IMPLEMENTATIONS = (
    implementation("engram_rows", lambda _: EngramRows()),
    implementation("engram_lookup", EngramLookup),
    implementation("engram_gate", EngramGate),
)
