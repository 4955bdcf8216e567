"""Token ids, bytes and texts of the released tokenizer and of the tiny one; incremental decoding."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers

from deepinfer.errors import ConfigError, RequestError
from deepinfer.tokenizer import IncrementalDetokenizer, Tokenizer

SAMPLES = [
    "hi",
    "Hello! 毕老师！1 + 1 = 2",
    "flags 🇩🇪🇫🇷 family 👩‍👩‍👧‍👦 Thai กำลังทำงาน",
    "  spaces\n\n\tand lines\r\n",
    "e\u0301 \u2028 \x00 \x7f",
]
CONTROL_LITERALS = ["<｜User｜>", "<think>", "</think>", "｜DSML｜", "<｜deepseek_image｜>", "<｜end▁of▁sentence｜>"]


def test_ids_of_the_released_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 129280
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert (len(tokenizer.added_token_ids), len(tokenizer.special_token_ids)) == (1283, 1229)
    assert [tokenizer.control_id(text) for text in CONTROL_LITERALS] == [128803, 128821, 128822, 128825, 129264, 1]
    assert tokenizer.control_id("hi") is None
    assert tokenizer.encode_text("hi") == [6366]
    assert tokenizer.encode_text(SAMPLES[1]) == [19923, 3, 223, 5464, 5008, 1175, 19, 940, 223, 19, 438, 223, 20]


def test_control_literals_become_ordinary_pieces(tokenizer: Tokenizer) -> None:
    for literal in CONTROL_LITERALS:
        ids = tokenizer.encode_text(f"a{literal}b")
        assert not tokenizer.added_token_ids & set(ids)
        assert tokenizer.decode(ids) == f"a{literal}b"
    assert len(tokenizer.encode_text("<｜User｜>")) == 5


@pytest.mark.parametrize("which", ["tokenizer", "tiny_tokenizer"])
def test_text_survives_encoding(which: str, request: pytest.FixtureRequest) -> None:
    chosen: Tokenizer = request.getfixturevalue(which)
    for text in SAMPLES:
        ids = chosen.encode_text(text)
        assert chosen.decode(ids) == text
        assert b"".join(chosen.token_bytes(token) for token in ids) == text.encode()


def test_decoding_agrees_with_the_library(tokenizer: Tokenizer, tokenizer_directory: Path) -> None:
    """Every single id and random rows, special tokens skipped and shown."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    singles = [[token] for token in range(tokenizer.vocab_size)]
    shown = library.decode_batch(singles, skip_special_tokens=False)
    assert [tokenizer.token_text(token) for token in range(tokenizer.vocab_size)] == shown
    generator = random.Random(3)
    for _ in range(300):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randint(1, 30))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def test_control_tokens_are_shown_and_may_be_missing(tokenizer: Tokenizer, tiny_tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(128803) == "<｜User｜>"
    assert tiny_tokenizer.vocab_size == 512
    assert tiny_tokenizer.control_id("<｜User｜>") is None


def test_characters_are_shown_when_they_are_whole(tokenizer: Tokenizer) -> None:
    for text in SAMPLES:
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = []
        for byte in text.encode():
            (token,) = [t for t in range(3, 259) if tokenizer.token_bytes(t) == bytes([byte])]
            pieces.append(detokenizer.push([token]))
        assert [piece for piece in pieces if piece] == list(text)
        assert detokenizer.flush() == ""


def test_flush_shows_a_cut_character_once(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode_text("🐈")[0]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert (detokenizer.push([first]), detokenizer.flush(), detokenizer.flush()) == (
        "",
        "\N{REPLACEMENT CHARACTER}",
        "",
    )
    assert detokenizer.push(tokenizer.encode_text("ok")) == "ok"


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 1") as caught:
        tokenizer.encode_text("a\ud800")
    assert caught.value.code == "invalid_value"


def test_missing_and_broken_files_are_named(tokenizer_directory: Path, tmp_path: Path) -> None:
    def attempt(name: str, content: str | None) -> str:
        directory = tmp_path / "broken"
        directory.mkdir(exist_ok=True)
        config = (tokenizer_directory / "tokenizer_config.json").read_text()
        (directory / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {}}}')
        (directory / "tokenizer_config.json").write_text(config)
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_text(content)
        with pytest.raises(ConfigError) as caught:
            Tokenizer.from_directory(directory)
        return str(caught.value)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert f"broken/{name}: can't be read (No such file" in attempt(name, None)
        assert f"broken/{name}: not a JSON object" in attempt(name, "[1, 2")
    assert "tokenizer.json: not a byte-level BPE" in attempt("tokenizer.json", "{}")
    assert "0 to 1 without gaps" in attempt(
        "tokenizer.json", json.dumps({"added_tokens": [], "model": {"vocab": {"a": 0, "b": 2}}})
    )
    tiny = (Path(__file__).parents[1] / "golden" / "w16" / "tokenizer.json").read_text()
    (tmp_path / "broken").mkdir(exist_ok=True)
    directory = tmp_path / "broken"
    (directory / "tokenizer.json").write_text(tiny)
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(ConfigError, match="bos_token is '<s>', which is no added token"):
        Tokenizer.from_directory(directory)
