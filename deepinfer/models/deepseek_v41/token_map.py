"""Compressed vocabulary of the n-gram memory: token ids whose texts differ only in case, accents or white space share
one class.

Rule and Unicode steps: the released `inference/engram.py`. The map depends on every token string, so another version
of a tokenizer silently rehashes everything: `check_token_map` holds the released one to its hash.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.errors import CheckpointError
from deepinfer.models.deepseek_v41.config import ModelConfig

TOKENIZER_FILE: Final = "tokenizer.json"
IMAGE_TOKEN: Final = "<｜deepseek_image｜>"
RELEASED_VOCAB_SIZE: Final = 129280
RELEASED_SHA256: Final = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"

_REPLACEMENT = "\ufffd"
_SINGLE_SPACE = "\ue000"  # private use: protects a text that is one space from being stripped


def read_token_map(directory: Path, config: ModelConfig) -> npt.NDArray[np.int32]:
    """Return the checked map of a checkpoint's tokenizer: class of each token id, int32 [vocab_size].

    Raises `CheckpointError` naming the tokenizer file when it is missing, broken or not the one of this checkpoint.
    """
    token_map = build_token_map(load_tokenizer(directory))
    check_token_map(token_map, config)
    return token_map


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load `tokenizer.json`; raises `CheckpointError`."""
    path = directory / TOKENIZER_FILE
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; a checkpoint directory needs it")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None


def build_token_map(tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """Return the class of each token id, int32 [number of ids, added tokens included].

    A token's key is its decoded text, normalised; the text itself when nothing is left of it; the raw token string
    when the text is no valid UTF-8 alone. Equal keys share a class; classes count up in order of first appearance.
    """
    num_ids = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(num_ids)], skip_special_tokens=False)
    normalizer = _normalizer()
    classes: dict[str, int] = {}
    token_map = np.empty(num_ids, dtype=np.int32)
    for token, text in enumerate(texts):
        key = tokenizer.id_to_token(token) if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        if key is None:
            raise CheckpointError(f"{TOKENIZER_FILE}: id {token} of {num_ids} has no token")
        token_map[token] = classes.setdefault(key, len(classes))
    return token_map


def check_token_map(token_map: npt.NDArray[np.int32], config: ModelConfig) -> None:
    """Raise `CheckpointError` unless the map fits the config, and equals the released one for the released size."""
    if len(token_map) != config.vocab_size:
        raise CheckpointError(
            f"{TOKENIZER_FILE} has {len(token_map)} ids, the model's vocab_size is {config.vocab_size}"
        )
    num_classes = int(token_map.max()) + 1
    if num_classes != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{TOKENIZER_FILE} has {num_classes} classes of token texts, engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}: it belongs to another version of the model"
        )
    pad = config.engram_pad_token_id  # a raw id and a class at once: the rule holds only where both are equal
    if token_map[pad] != pad:
        raise CheckpointError(f"{TOKENIZER_FILE} puts engram_pad_token_id {pad} into class {token_map[pad]}, not {pad}")
    if config.vocab_size == RELEASED_VOCAB_SIZE and token_map_sha256(token_map) != RELEASED_SHA256:
        raise CheckpointError(f"{TOKENIZER_FILE} is not the released one: the hash of its token map differs")


def token_map_sha256(token_map: npt.NDArray[np.int32]) -> str:
    """Return the hex SHA-256 of the map as little-endian int32."""
    return hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _SINGLE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SINGLE_SPACE, " "),
        ]
    )
