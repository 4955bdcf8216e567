"""Masks of many sequences filled on threads: the same bits as one sequence after the other."""

from __future__ import annotations

import random

import pytest
import torch
from grammar_case import EOS, THINK_CLOSE, TOKENIZER, VOCAB_SIZE, json_spec, regex_spec, sequence

from deepinfer.protocol import GrammarSpec
from deepinfer.structured_outputs.bitmask import num_words
from deepinfer.structured_outputs.grammar import SequenceGrammar
from deepinfer.structured_outputs.mask_filler import MaskFiller

MAX_DRAFTS = 5
CITY = json_spec({"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}})
SPECS = [CITY, regex_spec(r"(?:ab?c)*"), json_spec({"type": "boolean"}), GrammarSpec(kind="ebnf", text="root ::= root")]
TEXTS = ['{"city": "the world", "n": 12}', "abcacabcabc", "true", ""]


def _one_step(seed: int, count: int = 120) -> tuple[list[SequenceGrammar], list[list[int]]]:
    """Sequences somewhere in their answer (reasoning, the middle, the end, behind it, stuck), with drafts behind."""
    numbers = random.Random(seed)
    grammars, drafts = [], []
    for place in range(count):
        kind = place % len(SPECS)
        answer = [*TOKENIZER.encode_text(TEXTS[kind]), EOS]
        known = numbers.randrange(len(answer) + 1)
        assert THINK_CLOSE is not None
        thoughts = [numbers.randrange(3, 200) for _ in range(numbers.randrange(3))]
        thinks = place % 5 == 0
        if thinks and place % 2:
            taken, ahead = thoughts, [THINK_CLOSE, *answer]
        else:
            taken, ahead = [*([*thoughts, THINK_CLOSE] if thinks else []), *answer[:known]], answer[known:]
        guess = [token if numbers.random() < 0.9 else numbers.randrange(VOCAB_SIZE) for token in ahead[:MAX_DRAFTS]]
        grammars.append(sequence(SPECS[kind], in_reasoning=thinks, token_ids=taken))
        drafts.append(guess + [7] * (MAX_DRAFTS - len(guess)) if numbers.random() < 0.8 else guess)
    return grammars, drafts


def _words(count: int) -> torch.Tensor:
    return torch.full((count, 1 + MAX_DRAFTS, num_words(VOCAB_SIZE)), 0x5A5A5A5A, dtype=torch.int32)


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_threads_change_no_bit(num_threads: int) -> None:
    """Twice in a row: what was tried with the drafts has been taken back."""
    filler = MaskFiller(num_threads)
    grammars, drafts = _one_step(num_threads)
    alone, _ = _one_step(num_threads)
    for _ in range(2):
        words, expected = _words(len(grammars)), _words(len(grammars))
        counts = filler.fill(grammars, drafts, words)
        for place, grammar in enumerate(alone):
            num_valid = grammar.fill(expected[place], drafts[place])
            expected[place, num_valid + 1 :] = expected[place, num_valid]
            assert counts[place] == num_valid
        assert torch.equal(words, expected)
    assert [grammar.failure for grammar in grammars] == [grammar.failure for grammar in alone]
    assert {0, 1, 2, 3, 4, MAX_DRAFTS} == set(counts)
    assert any(grammar.failure for grammar in grammars)


def test_the_answers_go_on_as_they_would_have_gone_on_alone() -> None:
    grammars, drafts = _one_step(3)
    alone, _ = _one_step(3)
    counts = MaskFiller(3).fill(grammars, drafts, _words(len(grammars)))
    for grammar, other, tokens, count in zip(grammars, alone, drafts, counts, strict=True):
        for one in (grammar, other):
            one.accept(tokens[:count])
        rows = _words(2)
        assert grammar.fill(rows[0]) == other.fill(rows[1]) == 0
        assert torch.equal(rows[0, 0], rows[1, 0])


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, drafts = _one_step(4)

    def break_down(*_: object) -> int:
        raise MemoryError("no room")

    monkeypatch.setattr(SequenceGrammar, "fill", break_down)
    with pytest.raises(MemoryError):
        MaskFiller(3).fill(grammars, drafts, _words(len(grammars)))
