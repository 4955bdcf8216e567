"""Noise: published answers of the generator, our own vectors, and independence of everything but the key."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.kernels.reference.sampling import gumbel_argmax, gumbel_noise, noise_words, philox
from deepinfer.sampling.noise import TOKEN_PURPOSE

VECTORS = [
    (0, 0, 0, 0, 0x6627E8D5, 0.674840),
    (42, 0, 0, 0, 0x9CEAF053, 0.052107),
    (42, 17, 0, 1, 0xC97FF0A7, -0.436300),
    (42, 17, 0, 129279, 0x2B69D345, 1.682934),
    (42, 18, 0, 1, 0xA5B27D95, -0.041151),
    (2**63 - 1, 1048575, 0, 5, 0xE7E890B2, -0.860066),
    (42, 17, 2, 0, 0xE608EBE2, -0.827863),
]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_its_published_answers(word: int, expected: list[int]) -> None:
    words = torch.tensor([word])
    assert [int(out) for out in philox((words, words, words, words), (words, words))] == expected


@pytest.mark.parametrize(("seed", "position", "purpose", "token_id", "word", "noise"), VECTORS)
def test_noise_vectors(seed: int, position: int, purpose: int, token_id: int, word: int, noise: float) -> None:
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    words = noise_words(seeds, positions, purpose=purpose, num_tokens=token_id + 1)
    assert words.shape == (1, token_id + 1)
    assert int(words[0, token_id]) == word
    value = gumbel_noise(seeds, positions, purpose=purpose, num_tokens=token_id + 1)[0, token_id]
    assert value.dtype == torch.float32
    assert round(float(value), 6) == noise


def test_every_part_of_the_key_matters() -> None:
    keys = [(1, 5, 0), (2, 5, 0), (1 + 2**32, 5, 0), (1, 6, 0), (1, 5 + 2**32, 0), (1, 5, 1)]
    words = {
        tuple(noise_words(torch.tensor([seed]), torch.tensor([position]), purpose=purpose, num_tokens=4)[0].tolist())
        for seed, position, purpose in keys
    }
    assert len(words) == len(keys)


def test_extreme_words_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "deepinfer.kernels.reference.sampling.noise_words", lambda *_, **__: torch.tensor([[0, 2**32 - 1]])
    )
    noise = gumbel_noise(torch.zeros(1).long(), torch.zeros(1).long(), purpose=0, num_tokens=2)
    largest, smallest = 33 * math.log(2), -math.log(24 * math.log(2))  # of u = 2**-33 and of u = 1 - 2**-24
    assert noise[0].tolist() == pytest.approx([largest, smallest], abs=1e-6)


def test_a_draw_is_the_same_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(300, 1001, generator=generator)  # more rows than one chunk
    seeds = torch.randint(0, 2**62, (300,), generator=generator)
    positions = torch.randint(0, 2**20, (300,), generator=generator)
    temperatures = torch.tensor([1.0, 0.5, 0.0]).repeat(100)
    together = gumbel_argmax(scores, seeds, positions, temperatures, purpose=TOKEN_PURPOSE)
    alone = [
        gumbel_argmax(*(part[r : r + 1] for part in (scores, seeds, positions, temperatures)), purpose=TOKEN_PURPOSE)
        for r in range(300)
    ]
    assert torch.equal(together[2::3], scores[2::3].argmax(1))
    hotter = gumbel_argmax(scores / 0.5, seeds, positions, torch.ones(300), purpose=TOKEN_PURPOSE)
    assert torch.equal(hotter[1::3], together[1::3])
    assert torch.equal(together, torch.cat(alone))


def test_one_remaining_id_is_drawn() -> None:
    scores = torch.full((64, 50), -torch.inf)
    scores[:, 33] = -1e30
    drawn = gumbel_argmax(scores, torch.arange(64), torch.arange(64), torch.ones(64), purpose=TOKEN_PURPOSE)
    assert drawn.tolist() == [33] * 64
