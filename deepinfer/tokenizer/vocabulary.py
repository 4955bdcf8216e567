"""Token ids, their bytes and their texts, read from a checkpoint's `tokenizer.json` and `tokenizer_config.json`.

Control tokens (every added token, flagged special or not) are found by their text and never arise from encoded text:
added tokens are hard cuts of the prompt, so plain text is encoded by the base vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from deepinfer.errors import CheckpointError, RequestError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def _byte_characters() -> dict[int, int]:
    """Code point -> byte of the byte-level alphabet (OpenAI's GPT-2 encoder): printable Latin-1 stands for itself,
    the other 68 bytes are U+0100 onwards in ascending order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def _token_bytes(token: str) -> bytes:
    """Bytes of a base token; one that has characters outside the byte-level alphabet stands for its own text."""
    if all(ord(character) in _BYTE_OF_CHARACTER for character in token):
        return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    return token.encode()


class Tokenizer:
    """The vocabulary of one checkpoint. Immutable; one per process is enough.

    `vocab_size` counts all ids, base and added; `added_token_ids` are the control tokens, `special_token_ids` those
    of them that are flagged special.
    """

    def __init__(self, definition: dict[str, Any], config: dict[str, Any]) -> None:
        """`definition` and `config` are the decoded JSON files; a missing or misshapen entry raises `CheckpointError`.

        The padding token falls back to the end token, as generation never reads it.
        """
        added = {entry["content"]: int(entry["id"]) for entry in definition["added_tokens"]}
        tokens = {index: token for token, index in definition["model"]["vocab"].items()}
        tokens.update({index: token for token, index in added.items()})
        if sorted(tokens) != list(range(len(tokens))):
            raise CheckpointError(f"{TOKENIZER_FILE}: the token ids are not 0 to {len(tokens) - 1} without gaps")
        self._added: dict[str, int] = added
        self.vocab_size = len(tokens)
        self.added_token_ids = frozenset(added.values())
        self.special_token_ids = frozenset(int(e["id"]) for e in definition["added_tokens"] if e["special"])
        self._bytes = [
            tokens[index].encode() if index in self.added_token_ids else _token_bytes(tokens[index])
            for index in range(len(tokens))
        ]
        base_only = msgspec.json.encode({**definition, "added_tokens": []}).decode()
        self._encoder = tokenizers.Tokenizer.from_str(base_only)
        self.bos_token_id = self._configured_id(config, "bos_token")
        self.eos_token_id = self._configured_id(config, "eos_token")
        has_padding = config.get("pad_token") is not None
        self.pad_token_id = self._configured_id(config, "pad_token") if has_padding else self.eos_token_id

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint directory. Raises `CheckpointError` that names the missing or broken file."""
        directory = Path(path)
        config = _read_json(directory / TOKENIZER_CONFIG_FILE)
        definition = _read_json(directory / TOKENIZER_FILE)
        try:
            return cls(definition, config)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}; take the files of the released checkpoint") from error
        except Exception as error:  # `tokenizers` raises bare Exception
            raise CheckpointError(
                f"{directory / TOKENIZER_FILE}: not a byte-level BPE tokenizer "
                f"({type(error).__name__}: {error}); take the file of the released checkpoint"
            ) from error

    def control_id(self, text: str) -> int | None:
        """Id of the added token with this text, None if the vocabulary has none."""
        return self._added.get(text)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, and literals of control tokens become ordinary pieces.

        Raises `RequestError` for text that is no valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate at character {error.start}, which no UTF-8 text can; remove it",
                code="invalid_value",
            ) from error
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids. Bytes that are no UTF-8 become U+FFFD; only tokens flagged special can be skipped."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        content = b"".join(self._bytes[token] for token in ids if token not in skipped)
        return content.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token, maybe a part of a character; a control token's are its text in UTF-8."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token for display: control tokens are shown, parts of characters become U+FFFD."""
        return self._bytes[token_id].decode(errors="replace")

    def _configured_id(self, config: dict[str, Any], name: str) -> int:
        entry = config.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        token_id = self._added.get(text) if isinstance(text, str) else None
        if token_id is None:
            raise CheckpointError(
                f"{TOKENIZER_CONFIG_FILE}: {name} is {text!r}, which is no added token of {TOKENIZER_FILE}"
            )
        return token_id


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(
            f"{path}: can't be read ({error.strerror}); the checkpoint directory must hold {path.name}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a JSON object ({error}); fetch the file again") from error
