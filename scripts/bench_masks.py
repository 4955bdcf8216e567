"""Time the masks of a decode step on the host.

    python scripts/bench_masks.py [--checkpoint DIR] [--rows 64 256] [--drafts 0 5]

Without a checkpoint, whose tokenizer is then used, the vocabulary is made up: 129,280 short texts. Sequences stand at
different places of a JSON answer, and their drafts hold. Prints the shortest time of a step and the time of a mask.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import string
import time
from pathlib import Path

import torch
import xgrammar

from deepinfer.schema_check import grammar_of_so_args
from deepinfer.structured_outputs.bitmask import num_words, words_of
from deepinfer.structured_outputs.grammar import SequenceGrammar
from deepinfer.structured_outputs.languages import build_grammar
from deepinfer.structured_outputs.vocabulary import GrammarVocabulary, grammar_vocabulary
from deepinfer.tokenizer import Tokenizer

VOCAB_SIZE = 129_280
REPEATS = 20
TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {"name": TEXT, "count": {"type": "integer"}, "tags": {"type": "array", "items": TEXT}, "more": TEXT},
    "required": ["name", "count", "tags", "more"],
}
ANSWER = '{"name": "somebody else", "count": 1234, "tags": ["red", "green", "blue"], "more": "nothing that matters"}'


def made_up_vocabulary() -> GrammarVocabulary:
    """Token 0 ends; then the bytes, then words with and without a space, a quote or a comma around them."""
    letters = ("".join(word) for size in (2, 3) for word in itertools.product(string.ascii_lowercase, repeat=size))
    words = (before + word + behind for word in letters for before in ("", " ") for behind in ("", '"', ",", ".", ": "))
    texts = [b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in words)][:VOCAB_SIZE]
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[0])
    return GrammarVocabulary(info, VOCAB_SIZE, 0, None, None, words_of(torch.tensor([0]), VOCAB_SIZE))


def steps(vocabulary: GrammarVocabulary, token_ids: list[int], rows: int) -> list[SequenceGrammar]:
    """Return `rows` sequences at places spread over the answer."""
    spec = grammar_of_so_args({"schema_type": "json", "schema": json.dumps(SCHEMA)})
    engine = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    compiled = engine.compile_grammar(build_grammar(spec, dsml_id=None))
    places = (place % len(token_ids) for place in range(rows))
    return [SequenceGrammar(compiled, vocabulary, token_ids=token_ids[:place]) for place in places]


def milliseconds(grammars: list[SequenceGrammar], drafts: list[list[int]], width: int) -> float:
    """Return the shortest time of a step."""
    words = torch.empty((len(grammars), 1 + max(map(len, drafts)), width), dtype=torch.int32)
    best = math.inf
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for grammar, tokens, rows in zip(grammars, drafts, words, strict=True):
            grammar.fill(rows, tokens)
        best = min(best, 1000 * (time.perf_counter() - begin))
    return best


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 5])
    options = parser.parse_args()
    if options.checkpoint is None:
        vocabulary, token_ids = made_up_vocabulary(), [1 + byte for byte in ANSWER.encode()]
    else:
        tokenizer = Tokenizer.from_directory(options.checkpoint)
        vocabulary = grammar_vocabulary(tokenizer, vocab_size=tokenizer.vocab_size)
        token_ids = tokenizer.encode_text(ANSWER)
    for rows, num_drafts in itertools.product(options.rows, options.drafts):
        grammars = steps(vocabulary, token_ids, rows)
        drafts = [(token_ids + token_ids)[place % len(token_ids) :][:num_drafts] for place in range(rows)]
        best = milliseconds(grammars, drafts, num_words(vocabulary.vocab_size))
        num_masks = rows * (1 + num_drafts)
        print(
            f"{rows} sequences, {num_drafts} drafts: {best:.2f} ms, {1000 * best / num_masks:.1f} us a mask", flush=True
        )


if __name__ == "__main__":
    main()
