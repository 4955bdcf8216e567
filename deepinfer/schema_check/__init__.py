"""What can be enforced of a structured output's specification, found out before any rank sees it."""

from deepinfer.schema_check.regex import normalize_regex
from deepinfer.schema_check.schema import normalize_schema
from deepinfer.schema_check.spec import grammar_of_response_format, grammar_of_so_args

__all__ = ["grammar_of_response_format", "grammar_of_so_args", "normalize_regex", "normalize_schema"]
