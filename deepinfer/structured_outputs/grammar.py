"""Where one sequence stands in its grammar: takes committed tokens, fills masks, tries drafts and takes them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xgrammar

from deepinfer.structured_outputs.bitmask import WORD_BITS, num_words
from deepinfer.structured_outputs.vocabulary import GrammarVocabulary

Masks = np.ndarray[Any, np.dtype[np.int32]]

_ALL = -1  # every bit of a word


@dataclass(slots=True, frozen=True)
class RequestGrammar:
    """A request's compiled grammar; its answers begin inside the reasoning or not."""

    compiled: xgrammar.CompiledGrammar
    vocabulary: GrammarVocabulary
    in_reasoning: bool = False

    def begin(self, token_ids: Iterable[int] = ()) -> SequenceGrammar:
        """Return the state of a new sequence behind `token_ids`, the output known so far."""
        return SequenceGrammar(self.compiled, self.vocabulary, in_reasoning=self.in_reasoning, token_ids=token_ids)


class SequenceGrammar:
    """The grammar holds from the first token behind the reasoning on; within it only the end of sequence is barred.

    `failure` says why the sequence can't go on: a committed token that the grammar refuses, or no token that it allows.
    """

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        vocabulary: GrammarVocabulary,
        *,
        in_reasoning: bool = False,
        token_ids: Iterable[int] = (),
    ) -> None:
        """Begin at the start and take `token_ids`, the output known so far (a replay, or the first token)."""
        assert not in_reasoning or vocabulary.think_close_id is not None, "nothing could end the reasoning"
        self.failure: str | None = None
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocabulary = vocabulary
        self._in_reasoning = in_reasoning
        self.accept(token_ids)

    @property
    def num_words(self) -> int:
        """Width of a mask."""
        return num_words(self._vocabulary.vocab_size)

    def accept(self, token_ids: Iterable[int]) -> None:
        """Take committed tokens; those behind the end of the grammar are left alone, as the sequence ends there."""
        for token_id in token_ids:
            if self.failure is not None or self._matcher.is_terminated():
                return
            if self._in_reasoning:
                self._in_reasoning = token_id != self._vocabulary.think_close_id
            elif not self._matcher.accept_token(token_id):
                self.failure = f"the grammar refuses token {token_id}, which was drawn"

    def fill(self, words: torch.Tensor, drafts: Sequence[int] = ()) -> int:
        """Fill rows 0 .. m of `words` [1 + len(drafts), W] int32 and return m, how many drafts may be verified.

        Row j is the mask of the token behind j drafts. Drafts are cut before the first one that the grammar refuses or
        that would end the sequence. The state is afterwards what it was. Without a mask nothing is allowed: `failure`.
        """
        masks = words.numpy()  # shares the memory; much cheaper to look into
        in_reasoning, num_taken, num_valid = self._in_reasoning, 0, 0
        if not self._fill_row(masks, 0, in_reasoning=in_reasoning):
            self.failure = "the grammar allows no token here and is not at its end"
            return 0
        for row, draft in enumerate(drafts, start=1):
            if draft == self._vocabulary.eos_token_id or self._matcher.is_terminated():
                break
            if in_reasoning:
                in_reasoning = draft != self._vocabulary.think_close_id
            elif _may_take(masks[row - 1], draft) and self._matcher.accept_token(draft):
                num_taken += 1
            else:
                break
            if not self._fill_row(masks, row, in_reasoning=in_reasoning):
                break
            num_valid = row
        self._matcher.rollback(num_taken)
        return num_valid

    def _fill_row(self, masks: Masks, row: int, *, in_reasoning: bool) -> bool:
        """Return whether anything is allowed."""
        only_eos = self._vocabulary.only_eos.numpy()
        if self._matcher.is_terminated():  # the row's result will be thrown away
            masks[row] = only_eos
        elif in_reasoning:
            masks[row] = ~only_eos
        elif not self._matcher.fill_next_token_bitmask(masks, row):
            masks[row] = _ALL  # the engine says so of a row that needs no mask
        return bool(masks[row].any())


def _may_take(mask: Masks, token_id: int) -> bool:
    return bool(int(mask[token_id // WORD_BITS]) >> (token_id % WORD_BITS) & 1)
