"""A checkpoint's vocabulary as the grammar engine sees it: no control token has a text there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xgrammar

from deepinfer.structured_outputs.bitmask import words_of
from deepinfer.tokenizer import Tokenizer
from deepinfer.tokenizer.chat import THINK_CLOSE
from deepinfer.tokenizer.dsml import DSML

# No UTF-8 text holds this byte, so only a rule that names the token by its id can match it.
_NEVER_TEXT = b"\xff"


@dataclass(slots=True, frozen=True)
class GrammarVocabulary:
    """`info` for the engine, and the ids that have a meaning of their own; None where the vocabulary lacks the token.

    `only_eos` [W] int32 is the mask that allows the end of sequence and nothing else.

    Added tokens are strings too: with their texts a JSON string could hold the end of a turn as a token. So each of
    them has an empty text and is never allowed, except that the end-of-sequence token stops a grammar, and the tool
    call mark can be named by rules.
    """

    info: xgrammar.TokenizerInfo
    vocab_size: int
    eos_token_id: int
    think_close_id: int | None
    dsml_id: int | None
    only_eos: torch.Tensor


def grammar_vocabulary(tokenizer: Tokenizer, *, vocab_size: int) -> GrammarVocabulary:
    """Return the vocabulary for a model with `vocab_size` logits."""
    dsml_id = tokenizer.control_id(DSML)
    texts = [
        b"" if token_id in tokenizer.added_token_ids else tokenizer.token_bytes(token_id)
        for token_id in range(tokenizer.vocab_size)
    ]
    if dsml_id is not None:
        texts[dsml_id] = _NEVER_TEXT
    eos_token_id = tokenizer.eos_token_id
    info = xgrammar.TokenizerInfo(
        texts, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[eos_token_id], add_prefix_space=False
    )
    return GrammarVocabulary(
        info=info,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        think_close_id=tokenizer.control_id(THINK_CLOSE),
        dsml_id=dsml_id,
        only_eos=words_of(torch.tensor([eos_token_id]), vocab_size),
    )
