"""Tokenizer of the tiny checkpoint: all 256 bytes, short pieces for common words, V4.1's control tokens by text.

The pre-tokenisation rules and the texts and flags of the control tokens are those of the released `tokenizer.json`;
its ids are not: whoever needs a control token looks it up by its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from deepinfer.models.deepseek_v41.token_map import IMAGE_TOKEN

VOCAB_SIZE: Final = 640
SYSTEM_TOKEN: Final = "<｜System｜>"
END_TOKEN: Final = "<｜end▁of▁sentence｜>"
THINK_END_TOKEN: Final = "</think>"

_LEADING_TOKENS: Final = ("<｜begin▁of▁sentence｜>", END_TOKEN, "<｜▁pad▁｜>")
_CONTROL_TOKENS: Final = (
    SYSTEM_TOKEN,
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|EOT|>",
    "<think>",
    THINK_END_TOKEN,
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE_TOKEN,
)
_SPECIAL_TOKENS: Final = (
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
)

# A word becomes one token behind a space, its beginnings become tokens too.
_WORDS: Final = (
    "the of and to in is it that for was on are as with his they at be this have from or one had by word but not what "
    "all were we when your can there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more write go see number no way could people my "
    "than first water been who its now long day did get come may part you answer question model hello world capital "
    "because think should well also just know good new work even any give most us after back only over very"
)
_OPENING_WORDS: Final = ("The", "What", "How", "Hello", "You", "This")

_NEWLINES: Final = "\r\n"
_SPLIT_PATTERNS: Final = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        rf"|[^{_NEWLINES}\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[{_NEWLINES}]*|\s*[{_NEWLINES}]+|\s+(?!\S)|\s+"
    ),
)


def tokenizer_json() -> dict[str, Any]:
    """Return the content of `tokenizer.json`: `VOCAB_SIZE` ids without a gap."""
    vocab = {token: number for number, token in enumerate([*_LEADING_TOKENS, *_byte_characters()])}
    merges = list(dict.fromkeys(_merges()))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(len(vocab))),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_pre_tokenizers())},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def tokenizer_config_json(context_length: int) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`."""
    bos, eos, pad = _LEADING_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }


def _added_tokens(num_base_tokens: int) -> Iterator[dict[str, Any]]:
    """Leading tokens, then place holders up to the size, then control tokens, as in the release."""
    num_place_holders = VOCAB_SIZE - num_base_tokens - len(_CONTROL_TOKENS) - len(_SPECIAL_TOKENS)
    assert num_place_holders >= 0, f"{num_base_tokens} base tokens leave no room"
    special = [f"<｜place▁holder▁no▁{number}｜>" for number in range(num_place_holders)]
    for token, text in enumerate(_LEADING_TOKENS):
        yield _added_token(token, text, is_special=True)
    for token, text in enumerate([*special, *_CONTROL_TOKENS, *_SPECIAL_TOKENS], start=num_base_tokens):
        yield _added_token(token, text, is_special=text not in _CONTROL_TOKENS)


def _added_token(token: int, text: str, *, is_special: bool) -> dict[str, Any]:
    return {
        "id": token,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": not is_special,
        "special": is_special,
    }


def _merges() -> Iterator[tuple[str, str]]:
    """Each word is grown from its first character, so that no merge of one word can break another word."""
    yield "Ċ", "Ċ"
    for text in [*(f"Ġ{word}" for word in _WORDS.split()), *_OPENING_WORDS]:
        for end in range(1, len(text)):
            yield text[:end], text[end]


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, num_moved = [], 0
    for byte in range(256):
        characters.append(chr(byte if byte in printable else 256 + num_moved))
        num_moved += byte not in printable
    return characters


def _pre_tokenizers() -> Iterator[dict[str, Any]]:
    for pattern in _SPLIT_PATTERNS:
        yield {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    yield {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
