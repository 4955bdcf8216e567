"""Prompting: vocabulary, chat encoding, incremental decoding and reading of answers."""

from deepinfer.tokenizer.calls import CallPiece
from deepinfer.tokenizer.chat import EncodedChat, encode_chat
from deepinfer.tokenizer.detokenizer import IncrementalDetokenizer
from deepinfer.tokenizer.output_parser import OutputDelta, OutputParser, ParsedCall, ParsedOutput
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
    "Tokenizer",
    "ToolSchema",
    "encode_chat",
    "parse_tools",
]
