"""Text out of a growing row of token ids, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from deepinfer.tokenizer.vocabulary import Tokenizer


class IncrementalDetokenizer:
    """Decodes one sequence as its tokens come.

    All pieces of `push` and the one of `flush` joined are `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these ids complete; bytes of an unfinished character wait for the next call."""
        token_bytes = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(token_bytes(token) for token in ids if token not in self._skipped))

    def flush(self) -> str:
        """U+FFFD for an unfinished character, else nothing. The detokenizer can then go on with the next id."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
