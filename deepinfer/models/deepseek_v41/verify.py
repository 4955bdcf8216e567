"""Checks a checkpoint directory against the model, without reading tensor data."""

from __future__ import annotations

from pathlib import Path

from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.checkpoint_files import Deviation, scan_checkpoint
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.tensor_check import compare_tensors
from deepinfer.models.deepseek_v41.tensor_table import tensor_table
from deepinfer.models.deepseek_v41.token_map import (
    IMAGE_TOKEN,
    TOKENIZER_FILE,
    build_token_map,
    check_token_map,
    load_tokenizer,
)


def verify_checkpoint(directory: Path) -> list[Deviation]:
    """Return every deviation of a checkpoint; none means that it can be loaded.

    Checked: `config.json`; index, shards and the byte range of each tensor; names, dtypes, shapes and scales of all
    tensors, draft stages included; the tokenizer and its map for the n-gram memory. Only headers and the size of the
    files are read, so a file of the right size with wrong content passes.
    """
    try:
        config = read_config(directory)
    except ConfigError as error:
        return [Deviation("config.json", str(error))]
    files, deviations = scan_checkpoint(directory)
    reported = {deviation.name for deviation in deviations}
    if files.entries:
        found = compare_tensors(files, tensor_table(config))
        deviations += [deviation for deviation in found if deviation.name not in reported]
    return deviations + _check_tokenizer(directory, config)


def _check_tokenizer(directory: Path, config: ModelConfig) -> list[Deviation]:
    try:
        tokenizer = load_tokenizer(directory)
        check_token_map(build_token_map(tokenizer), config)
    except CheckpointError as error:
        return [Deviation(TOKENIZER_FILE, str(error))]
    image = config.image_token_id
    text = tokenizer.id_to_token(image) if image is not None else IMAGE_TOKEN
    if text != IMAGE_TOKEN:  # V4's tokenizer has the same map, so only a renamed token tells it apart
        return [Deviation(TOKENIZER_FILE, f"image_token_id {image} is {text!r}, {IMAGE_TOKEN!r} is needed")]
    return []
