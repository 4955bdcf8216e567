"""From a grammar's specification to a grammar of xgrammar 0.2.9."""

from __future__ import annotations

import json

import xgrammar

from deepinfer.errors import RequestError
from deepinfer.protocol import GrammarSpec
from deepinfer.structured_outputs.json_grammar import json_grammar
from deepinfer.structured_outputs.tool_call_grammar import tool_call_grammar


def build_grammar(spec: GrammarSpec, *, dsml_id: int | None) -> xgrammar.Grammar:
    """Return the grammar of `spec`. Raises RequestError (code "invalid_grammar") with the engine's complaint."""
    try:
        if spec.kind == "json":
            return json_grammar(spec.text)
        if spec.kind == "regex":
            return xgrammar.Grammar.from_regex(spec.text)
        if spec.kind == "ebnf":
            return xgrammar.Grammar.from_ebnf(spec.text)
        assert spec.kind == "tool_calls", spec.kind
        return tool_call_grammar(json.loads(spec.text), dsml_id)
    except RuntimeError as error:
        raise RequestError(f"the grammar can't be compiled: {_complaint(error)}", code="invalid_grammar") from error


def _complaint(error: RuntimeError) -> str:
    """The engine's message without the place in its source."""
    message = str(error).strip().splitlines()[0]
    return message.partition(": ")[2] if message.startswith("[") else message
