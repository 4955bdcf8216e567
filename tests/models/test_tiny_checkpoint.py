"""The tiny checkpoint: released format, every mechanism, reproducible, safe to make at the same time."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoint_case import read_tensor
from tokenizers import Tokenizer

from deepinfer.errors import ConfigError
from deepinfer.models.checkpoint_files import CheckpointFiles, open_checkpoint
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.tiny import REVISION, tiny_directory, write_tiny
from deepinfer.models.deepseek_v41.verify import verify_checkpoint
from deepinfer.models.deepseek_v41.weights import load_weights

CONTENT = (1, "54d9f73f31bb1999", "861368f8a4d219ce", 70.018, 8170.16)
CONTROL_TEXTS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜deepseek_image｜>",
    "<｜action｜>",
    "<｜title｜>",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny / "tokenizer.json"))


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_it_verifies_and_loads(tiny: Path) -> None:
    assert verify_checkpoint(tiny) == []
    config = read_config(tiny)
    expert_ids = (tuple(range(config.n_routed_experts)),) * config.num_layers
    weights = load_weights(tiny, config, expert_ids=expert_ids, device=torch.device("cpu"))
    assert weights.embed.shape == (640, 128)
    assert sum(path.stat().st_size for path in tiny.iterdir()) < 12_000_000


def test_every_mechanism_is_in_it(tiny: Path) -> None:
    config = read_config(tiny)
    layers = range(config.num_layers)
    assert {config.compress_ratio(layer) for layer in layers} == {0, 1, 2}
    reused = [layer for layer in layers if config.kv_source_of(layer) not in (None, layer)]
    selected_again = [layer for layer in reused if config.is_index_source(layer) and config.inside_candidates(layer)]
    assert set(reused) > set(selected_again) != set()
    assert 0 < config.first_decoder_layer < config.num_layers
    assert len(config.engram_layer_ids) == 2
    assert config.num_draft_stages == 3
    assert config.max_position_embeddings >= 8192
    pool = config.candidate_topk_blocks * config.candidate_block_size
    assert config.index_topk < pool < 64
    assert config.sliding_window < 64
    assert config.n_routed_experts % 4 == 0  # four ranks share them evenly


def test_same_seed_same_bits_other_seed_other_weights(tiny: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "again", seed=0)
    write_tiny(tmp_path / "other", seed=1)
    assert digests(tmp_path / "again") == digests(tiny)
    other = digests(tmp_path / "other")
    assert {name for name, digest in digests(tiny).items() if other[name] != digest} == {"model.safetensors"}


def test_a_change_needs_another_revision(tiny: Path) -> None:
    """Caches keep the tiny model by its revision: who changes what is written raises REVISION, then these values."""
    found = digests(tiny)
    assert (REVISION, found["config.json"][:16], found["tokenizer.json"][:16]) == CONTENT[:3]
    files = open_checkpoint(tiny)
    sizes = [read_tensor(files, name).float().norm().item() for name in ("head.weight", "layers.2.attn.wkv.weight")]
    assert sizes == pytest.approx(CONTENT[3:], rel=1e-3)


def test_control_tokens_by_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 640
    for text in CONTROL_TEXTS:
        token = tokenizer.token_to_id(text)
        assert token is not None, text
        assert tokenizer.encode(text, add_special_tokens=False).ids == [token]
    flags = {text: token.special for token in tokenizer.get_added_tokens_decoder().values() for text in [token.content]}
    assert flags["<｜end▁of▁sentence｜>"]
    assert not any(
        flags[text] for text in ("<｜System｜>", "<｜User｜>", "</think>", "｜DSML｜", "<｜deepseek_image｜>")
    )


def test_config_and_tokenizer_agree_on_ids(tiny: Path, tokenizer: Tokenizer) -> None:
    config = read_config(tiny)
    texts = {
        "<｜begin▁of▁sentence｜>": config.bos_token_id,
        "<｜end▁of▁sentence｜>": config.eos_token_id,
        "<｜▁pad▁｜>": config.pad_token_id,
        "<｜System｜>": config.dspark_noise_token_id,
        "<｜deepseek_image｜>": config.image_token_id,
    }
    assert {text: tokenizer.token_to_id(text) for text in texts} == texts


@pytest.mark.parametrize(
    "text", ["", "The world", "naïve ٣ 毕老师\r\n\t👩‍👩‍👧 ｜", "a" * 50, "\x00\x7f\u0301 </thinkk>"]
)
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_all_bytes_are_there_and_common_words_are_short(tokenizer: Tokenizer) -> None:
    every_byte = bytes(range(256)).decode("latin-1").encode("latin-1")
    for byte in every_byte:
        character = chr(byte) if byte < 128 else None
        if character is not None:
            assert len(tokenizer.encode(character, add_special_tokens=False).ids) == 1
    assert len([token for token in tokenizer.get_vocab() if len(token) == 1]) == 256
    ids = tokenizer.encode("What is the answer to your first question?", add_special_tokens=False).ids
    assert len(ids) == 9


def _dequantize(files: CheckpointFiles, stem: str, *, is_fp4: bool) -> torch.Tensor:
    """Values of a quantised matrix from the format's definition alone."""
    weight, scale = read_tensor(files, f"{stem}.weight"), read_tensor(files, f"{stem}.scale")
    if is_fp4:
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        table = torch.cat([magnitudes, -magnitudes])
        values = torch.stack([table[(weight & 15).long()], table[(weight >> 4).long()]], dim=-1).flatten(1)
    else:
        values = weight.float()
    rows = values.shape[0] // scale.shape[0]
    factors = torch.exp2(scale.float() - 127).repeat_interleave(rows, dim=0).repeat_interleave(32, dim=1)
    return values * factors


@pytest.mark.parametrize(
    ("stem", "is_fp4", "size"),
    [
        ("layers.3.attn.wq_b", False, 64**-0.5),
        ("layers.3.ffn.experts.5.w2", True, 64**-0.5),
        ("layers.3.ffn.experts.5.w3", True, 128**-0.5),
        ("layers.4.engram.embed", False, 1.0),
    ],
)
def test_quantised_weights_have_the_wanted_size(tiny: Path, stem: str, is_fp4: bool, size: float) -> None:
    files = open_checkpoint(tiny)
    values = _dequantize(files, stem, is_fp4=is_fp4)
    scale = read_tensor(files, f"{stem}.scale")
    assert 0.7 * size < values.std().item() < 2.5 * size  # blocks differ by up to a factor of four
    assert len(scale.unique()) > 1
    assert 100 < scale.min() <= scale.max() < 140
    assert math.isclose(values.mean().item(), 0, abs_tol=0.1 * size)


def test_no_scale_is_not_a_number(tiny: Path) -> None:
    files = open_checkpoint(tiny)
    scales = [name for name, entry in files.entries.items() if entry.dtype == "F8_E8M0"]
    assert all(int(read_tensor(files, name).max()) < 255 for name in scales)


def test_a_directory_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="not an empty directory"):
        write_tiny(tmp_path)
    with pytest.raises(ConfigError, match="not an empty directory"):
        write_tiny(tmp_path / "mine")


def test_the_cached_one_is_not_written_again(tiny: Path) -> None:
    before = (tiny / "model.safetensors").stat()
    assert tiny_directory(tiny.parent) == tiny
    assert (tiny / "model.safetensors").stat() == before
    assert [path.name for path in tiny.parent.iterdir()] == [tiny.name]


def test_the_loser_of_a_race_takes_the_winners(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process finishes between our look and our rename."""

    def write_and_lose(directory: Path) -> None:
        write_tiny(directory)
        directory.rename(tmp_path / tiny.name) if not (tmp_path / tiny.name).exists() else None
        directory.mkdir()
        (directory / "mine").write_text("")

    monkeypatch.setattr("deepinfer.models.deepseek_v41.tiny.write_tiny", write_and_lose)
    found = tiny_directory(tmp_path)
    assert digests(found) == digests(tiny)
    assert [path.name for path in tmp_path.iterdir()] == [tiny.name]


def test_many_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(lambda _: tiny_directory(tmp_path), range(3)))
    assert found == set(tmp_path.iterdir())
    assert verify_checkpoint(found.pop()) == []


def test_an_unwritable_place_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't write"):
        tiny_directory(tmp_path / "file")


def test_logits_are_lively(tiny: Path) -> None:
    """A head of standard deviation 3, small for control tokens other than the ends of an answer."""
    config: ModelConfig = read_config(tiny)
    head = read_tensor(open_checkpoint(tiny), "head.weight").float()
    sizes = head.norm(dim=1)
    assert sizes[10].item() > 2
    assert sizes[config.bos_token_id] < 1 < sizes[config.eos_token_id]
