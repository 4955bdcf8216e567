"""Prompting: vocabulary, chat encoding, incremental decoding and reading of answers."""

from deepinfer.tokenizer.calls import CallPiece
from deepinfer.tokenizer.chat import EncodedChat, encode_chat
from deepinfer.tokenizer.detokenizer import IncrementalDetokenizer
from deepinfer.tokenizer.output_parser import OutputDelta, OutputParser, ParsedCall, ParsedOutput
from deepinfer.tokenizer.response_format import ResponseFormat, parse_response_format
from deepinfer.tokenizer.tools import ToolSchema, parse_tools
from deepinfer.tokenizer.vocabulary import Tokenizer

__all__ = [
    "CallPiece",
    "EncodedChat",
    "IncrementalDetokenizer",
    "OutputDelta",
    "OutputParser",
    "ParsedCall",
    "ParsedOutput",
    "ResponseFormat",
    "Tokenizer",
    "ToolSchema",
    "encode_chat",
    "parse_response_format",
    "parse_tools",
]
