"""Grammars over the tiny vocabulary, and what texts they take."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
import xgrammar

from deepinfer.models.deepseek_v41 import tiny_tokenizer
from deepinfer.protocol import GrammarSpec
from deepinfer.schema_check import normalize_regex, normalize_schema
from deepinfer.structured_outputs.bitmask import allowed_ids
from deepinfer.structured_outputs.grammar import SequenceGrammar
from deepinfer.structured_outputs.languages import build_grammar
from deepinfer.structured_outputs.vocabulary import GrammarVocabulary, grammar_vocabulary
from deepinfer.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer.tokenizer_json(), tiny_tokenizer.tokenizer_config_json(4096))
VOCAB_SIZE = TOKENIZER.vocab_size
EOS = TOKENIZER.eos_token_id
THINK_CLOSE = TOKENIZER.control_id("</think>")
DSML = TOKENIZER.control_id("｜DSML｜")


@functools.cache
def vocabulary() -> GrammarVocabulary:
    return grammar_vocabulary(TOKENIZER, vocab_size=VOCAB_SIZE)


@functools.cache
def compiled(spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    engine = xgrammar.GrammarCompiler(vocabulary().info, max_threads=1, cache_enabled=False)
    return engine.compile_grammar(build_grammar(spec, dsml_id=DSML))


def json_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind="json", text=json.dumps(normalize_schema(schema, param="schema"), ensure_ascii=False))


def regex_spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=normalize_regex(text, param="schema"))


def takes(spec: GrammarSpec, text: str | bytes) -> bool:
    """Whether `text` is a whole answer."""
    return takes_text(compiled(spec), text)


def takes_text(grammar: xgrammar.CompiledGrammar, text: str | bytes) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text) and matcher.is_completed())


def takes_value(schema: Any, value: Any) -> bool:
    return takes(json_spec(schema), json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def sequence(spec: GrammarSpec, **options: Any) -> SequenceGrammar:
    return SequenceGrammar(compiled(spec), vocabulary(), **options)


def masks(grammar: SequenceGrammar, drafts: list[int] | None = None) -> tuple[int, list[set[int]]]:
    """How many drafts are valid, and the allowed ids of the rows that were filled."""
    words = torch.full((1 + len(drafts or ()), grammar.num_words), 0x5A5A5A5A, dtype=torch.int32)
    num_valid = grammar.fill(words, drafts or ())
    rows = allowed_ids(words[: num_valid + 1], VOCAB_SIZE)
    return num_valid, [set(row.nonzero().flatten().tolist()) for row in rows]
