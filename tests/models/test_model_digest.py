"""One digest for equal checkpoints, another one after a change."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_case import W16, copy_w16, read_header, write_file

from deepinfer.errors import CheckpointError
from deepinfer.models.model_digest import model_digest


def test_digest_is_stable_and_sees_changes(tmp_path: Path) -> None:
    digest = model_digest(W16)
    copy_w16(tmp_path)
    assert model_digest(tmp_path) == digest
    path = tmp_path / "model.safetensors"
    header, data = read_header(path)
    first = sorted(header)[1]  # behind __metadata__: always sampled
    place = header[first]["data_offsets"][0]
    write_file(path, header, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert model_digest(tmp_path) != digest
    copy_w16(tmp_path)
    (tmp_path / "tokenizer.json").write_text((W16 / "tokenizer.json").read_text() + "\n")
    assert model_digest(tmp_path) != digest
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        model_digest(tmp_path)
