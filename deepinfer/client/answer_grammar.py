"""What a row's answer has to conform to, out of the three fields that can say so."""

from __future__ import annotations

from deepinfer.errors import invalid_value
from deepinfer.outputs import Row
from deepinfer.protocol import GrammarSpec, SamplingParams
from deepinfer.schema_check import grammar_of_response_format, grammar_of_so_args, grammar_of_tools
from deepinfer.tokenizer import EncodedChat


def answer_grammar(row: Row, chat: EncodedChat | None) -> GrammarSpec | None:
    """Return the specification for `row`'s answer, None for free text. Raises RequestError naming the field."""
    asked = {
        "so_args": None if row.params.so_args is None else grammar_of_so_args(row.params.so_args),
        "response_format": grammar_of_response_format(row.chat.response_format),
        "tool_choice": grammar_of_tools(chat.forced_tools) if chat is not None and chat.forced_tools else None,
    }
    given = {field: spec for field, spec in asked.items() if spec is not None}
    if not given:
        return None
    field = next(iter(given))
    if len(given) > 1:
        raise invalid_value(field, f"can't be combined with {list(given)[1]}; leave one of them out")
    if field != "tool_choice" and chat is not None and chat.output_format.parse_tools:
        raise invalid_value(field, "leaves no way to call a tool; leave tools out or set tool_choice to 'none'")
    _check_params(row.params, field)
    return given[field]


def _check_params(params: SamplingParams, field: str) -> None:
    """Refuse what would go against the grammar at its end, or leave no token that both allow."""
    for name, is_set in (
        ("ignore_eos", params.ignore_eos),
        ("min_tokens", params.min_tokens > 0),
        ("allowed_token_ids", params.allowed_token_ids is not None),
    ):
        if is_set:
            raise invalid_value(name, f"can't be combined with {field}; leave one of them out")
