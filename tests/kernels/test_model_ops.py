"""Norm, rotation, streams, experts and memory against plain formulas in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.swiglu import SwiGLU
from deepinfer.kernels.registry import select_kernels

KERNELS = select_kernels("cpu", numerics="fp32", batch_invariant=True, overrides={})


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(value: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(value.double(), wanted.double(), rtol=1e-5, atol=1e-6)


def test_rotation_is_a_complex_product_of_neighbours_and_can_be_undone() -> None:
    x, angles = draw(3, 2, 10), draw(3, 2, seed=1)
    turned = KERNELS.rotate(x, angles.cos(), angles.sin())
    pairs = torch.view_as_complex(x[..., 6:].unflatten(-1, (2, 2)).contiguous())
    close(
        turned[..., 6:], torch.view_as_real(pairs * torch.polar(torch.ones(3, 1, 2), angles.unsqueeze(1))).flatten(-2)
    )
    assert torch.equal(turned[..., :6], x[..., :6])
    close(KERNELS.rotate(turned, angles.cos(), angles.sin(), inverse=True), x)


def test_norm_of_a_zero_row_is_zero() -> None:
    x = torch.stack((torch.zeros(8), draw(8)))
    normed = KERNELS.rms_norm(x, torch.full((8,), 2.0), epsilon=1e-20)
    assert torch.equal(normed[0], torch.zeros(8))
    close(normed[1], 2 * x[1] / x[1].square().mean().sqrt())


def test_mix_columns_add_up_to_one_and_streams_follow_the_formula() -> None:
    streams, y = draw(5, 4, 6), draw(5, 6, seed=1)
    found = KERNELS.mix_coefficients(
        streams,
        KERNELS.mix_coefficients.prepare(draw(24, 24, seed=2)),
        torch.ones(3),
        draw(24, seed=3),
        epsilon=1e-20,
        mix_epsilon=1e-6,
        num_iterations=20,
    )
    close(found.mix.sum(1), torch.ones(5, 4))
    scores = streams.flatten(1) @ draw(24, 24, seed=2).t() / streams.flatten(1).square().mean(1, keepdim=True).sqrt()
    close(found.pre, torch.sigmoid(scores[:, :4] + draw(24, seed=3)[:4]) + 1e-6)
    close(found.post, 2 * torch.sigmoid(scores[:, 4:8] + draw(24, seed=3)[4:8]))
    close(KERNELS.collapse_streams(streams, found.pre), torch.einsum("tj,tjd->td", found.pre, streams))
    updated = found.post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("tjk,tjd->tkd", found.mix, streams)
    close(KERNELS.update_streams(streams, y, found.post, found.mix), updated)


def test_routing_selects_with_the_bias_and_weighs_without_it() -> None:
    router = KERNELS.route_tokens.prepare(torch.tensor([[0.0], [1.0], [2.0], [3.0], [-200.0]]).bfloat16())
    bias, nobody = torch.tensor([10.0, 0.0, 0.0, 0.0, 0.0]), torch.zeros(1, dtype=torch.bool)
    ids, weights = KERNELS.route_tokens(torch.ones(1, 1), router, bias, nobody, num_chosen=2, scale=1.5)
    assert ids.tolist() == [[0, 3]]
    scores = torch.log1p(torch.exp(torch.tensor([[0.0, 3.0]]))).sqrt()
    close(weights, scores / scores.sum() * 1.5)


def test_routing_ties_go_to_the_lower_expert() -> None:
    padding = torch.tensor([False, True])
    router = KERNELS.route_tokens.prepare(torch.ones(9, 4).bfloat16())
    ids, weights = KERNELS.route_tokens(torch.zeros(2, 4), router, torch.zeros(9), padding, num_chosen=3, scale=1.0)
    assert ids.tolist() == [[0, 1, 2], [-1, -1, -1]]
    close(weights[0], torch.full((3,), 1 / 3))


def test_swiglu_clamps_the_gate_from_above_only() -> None:
    gate, up = torch.tensor([[-9.0, 9.0, 1.0]]), torch.tensor([[5.0, -5.0, 1.0]])
    opened, limited = torch.tensor([[-9.0, 2.0, 1.0]]), torch.tensor([[2.0, -2.0, 1.0]])
    values = SwiGLU(KERNELS.numerics)(gate, up, limit=2.0, weights=torch.tensor([3.0]))
    close(values, 3 * torch.nn.functional.silu(opened) * limited)


def test_engram_rows_of_the_released_constants() -> None:
    # ids 0, 5, 17, 99091, 42 at layer 1 of the released model, positions 0 and 4
    multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    primes = torch.tensor(
        [
            [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183],
            [16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321],
            [16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463],
        ]
    )
    offsets = primes.flatten().cumsum(0).view(3, 8) - primes
    history = torch.tensor([[0, 2, 2, 2], [42, 99091, 17, 5]])
    rows = KERNELS.engram_rows(history, multipliers, primes, offsets)
    assert rows[0, [0, 1, 2, -1]].tolist() == [5702652, 24393184, 39183301, 380066193]
    assert rows[1, [0, 1, 2, -1]].tolist() == [13131409, 22107638, 46286683, 370256351]


def test_experts_weigh_before_the_down_projection() -> None:
    one = torch.full((1, 32, 16), 0x22, dtype=torch.uint8)  # all weights 1
    scale = torch.full((1, 32, 1), 127, dtype=torch.uint8)
    experts = KERNELS.expert_mlp.prepare(one, scale, one, scale, one, scale)
    rows = torch.full((1, 32), 0.01)
    done = KERNELS.expert_mlp(rows, torch.tensor([[0]]), torch.tensor([[0.5]]), experts, limit=10.0)
    out = done.values[done.places[:, 0]]
    inner = torch.tensor(0.32)
    close(out, torch.full((1, 32), 32 * 0.5 * torch.nn.functional.silu(inner).item() * 0.32))


def test_pair_compression_is_a_softmax_over_the_two_tokens() -> None:
    values, gates = draw(2, 3, 8), draw(2, 3, 8, seed=1) * 50
    rows, stored = torch.cat((values, gates), 2).unbind()[::-1]
    found = KERNELS.pair_compress(rows, stored, torch.arange(len(rows)))
    close(found, (torch.softmax(gates, 0) * values).sum(0))
