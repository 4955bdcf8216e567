"""What can be enforced of a structured output's specification, found out before any rank sees it."""

from deepinfer.schema_check.regex import normalize_regex
from deepinfer.schema_check.schema import normalize_schema
from deepinfer.schema_check.spec import grammar_of_response_format, grammar_of_so_args
from deepinfer.schema_check.tool_calls import grammar_of_tools

__all__ = [
    "grammar_of_response_format",
    "grammar_of_so_args",
    "grammar_of_tools",
    "normalize_regex",
    "normalize_schema",
]
