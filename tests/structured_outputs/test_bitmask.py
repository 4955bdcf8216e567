"""Bits and ids."""

from __future__ import annotations

import torch

from deepinfer.structured_outputs.bitmask import allowed_ids, num_words, words_of


def test_words_and_ids_are_each_other() -> None:
    for vocab_size in (1, 31, 32, 33, 640, 129_280):
        assert num_words(vocab_size) == -(-vocab_size // 32)
        ids = torch.unique(torch.randint(0, vocab_size, (40,)))
        allowed = allowed_ids(words_of(ids, vocab_size)[None], vocab_size)
        assert allowed.shape == (1, vocab_size)
        assert allowed[0].nonzero().flatten().tolist() == ids.tolist()


def test_the_highest_bit_is_an_id_too() -> None:
    words = words_of(torch.tensor([31, 63]), 64)
    assert words.tolist() == [-(2**31), -(2**31)]
    assert allowed_ids(words[None], 64)[0].nonzero().flatten().tolist() == [31, 63]
