"""Reference kernels of sampling: counter-based noise and the draw of a token from it.

Noise has no state. A random word depends only on (seed, position of the token to be produced, purpose, token id), so
batch order, chunking, preemption, speculation and the number of ranks can't change it.

Words come from Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011): key = the two halves
of the seed; counter = (token id >> 2, low half of the position, next 24 bits of the position | purpose << 24, 0);
output word `token id & 3`. One call serves four neighbouring ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.abilities import implementation

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_ELEMENTS_PER_CHUNK = 1 << 18  # int64 temporaries of a chunk stay near the caches


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of every counter: int64 tensors that broadcast together, holding words 0 .. 2**32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # Products wrap at 64 bits; the bits are those of the unsigned product, and the masks drop the sign.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def noise_words(seeds: Tensor, positions: Tensor, *, purpose: int, num_tokens: int) -> Tensor:
    """Return the random words [R, num_tokens] int64 of token ids 0 .. num_tokens - 1.

    `seeds`, `positions` [R] int64, not negative; 0 <= purpose < 256.
    """
    calls = torch.arange((num_tokens + 3) // 4, device=seeds.device)
    position_words = (positions & _WORD)[:, None], (((positions >> 32) & 0xFFFFFF) | purpose << 24)[:, None]
    key = (seeds & _WORD)[:, None], (seeds >> 32)[:, None]
    words = philox((calls, *position_words, torch.zeros_like(calls)), key)
    return torch.stack(words, dim=-1).reshape(len(seeds), -1)[:, :num_tokens]


def gumbel_noise(seeds: Tensor, positions: Tensor, *, purpose: int, num_tokens: int) -> Tensor:
    """Return standard Gumbel noise [R, num_tokens] float32, finite, computed in float64 and rounded once.

    u = (word + 1/2) / 2**32, at most 1 - 2**-24; the noise is -log(-log(1 - u)). Small u give the large values, which
    decide an arg-max, and there u is finest. Arguments as for `noise_words`.
    """
    words = noise_words(seeds, positions, purpose=purpose, num_tokens=num_tokens)
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def gumbel_argmax(
    scores: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    *,
    purpose: int,
    bias: Tensor | None = None,
) -> Tensor:
    """`ops.GumbelArgmax`. A row's result does not depend on other rows."""
    scores = scores if bias is None else scores + bias
    num_tokens = scores.shape[1]
    token_ids = scores.argmax(dim=1)
    drawing = temperatures.nonzero().flatten()
    num_rows = max(1, _ELEMENTS_PER_CHUNK // num_tokens)
    for start in range(0, len(drawing), num_rows):
        rows = drawing[start : start + num_rows]
        noise = gumbel_noise(seeds[rows], positions[rows], purpose=purpose, num_tokens=num_tokens)
        token_ids[rows] = noise.add_(scores[rows] / temperatures[rows, None]).argmax(dim=1)
    return token_ids.masked_fill_(~scores.amax(dim=1).isfinite(), -1)


IMPLEMENTATIONS = (implementation("gumbel_argmax", lambda _: gumbel_argmax),)
