"""A grammar vocabulary for the fake model: token 0 ends a sequence, the others are bytes."""

from __future__ import annotations

import torch
import xgrammar

from deepinfer.structured_outputs.bitmask import words_of
from deepinfer.structured_outputs.compiler import GrammarCompiler
from deepinfer.structured_outputs.vocabulary import GrammarVocabulary


def fake_compiler(vocab_size: int, *, think_close_id: int | None = None) -> GrammarCompiler:
    """Token i is the byte i, from 1 on; `think_close_id` has no text."""
    texts = [b"" if token_id in (0, think_close_id) else bytes([token_id]) for token_id in range(vocab_size)]
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[0])
    only_eos = words_of(torch.tensor([0]), vocab_size)
    return GrammarCompiler(GrammarVocabulary(info, vocab_size, 0, think_close_id, None, only_eos))
