"""JSON Schemas as grammars of xgrammar 0.2.9."""

from __future__ import annotations

import xgrammar

# Between the elements of a JSON text; enough for a line break and some levels of indentation.
MAX_WHITESPACE = 8
# Characters of a string with a length: the engine lets control characters and the bytes of surrogates through.
_LOOSE_CHARACTER = r"[^\"\\\r\n]"
_STRING_CHARACTER = r"[^\0-\x1f\"\\\ud800-\udfff]"


def json_grammar(schema: str) -> xgrammar.Grammar:
    """Return the grammar of a JSON Schema that has passed `schema_check`; white space is bounded, objects closed."""
    grammar = xgrammar.Grammar.from_json_schema(
        schema, any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE, strict_mode=True
    )
    text = str(grammar)
    if _LOOSE_CHARACTER not in text:
        return grammar
    return xgrammar.Grammar.from_ebnf(text.replace(_LOOSE_CHARACTER, _STRING_CHARACTER))
