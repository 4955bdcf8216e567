"""Text that other engines have garbled: characters of several tokens, cut thoughts, log-probabilities as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.llm import LLM
from deepinfer.protocol import SamplingParams
from tests.doors.batch_files import row
from tests.scenarios.jobs import CHAT, ask, choice, failed

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = "🇩🇪👨‍👧กำ"


def byte_tokens(llm: LLM, text: str) -> tuple[int, ...]:
    """The tokens that stand for one byte each of `text`."""
    ids = {llm.tokenizer.token_bytes(token): token for token in reversed(range(llm.tokenizer.vocab_size))}
    return tuple(ids[bytes([byte])] for byte in text.encode())


@pytest.mark.parametrize(("num_tokens", "seed"), [(7, 1), (8, 2)])
def test_p15_streams_of_broken_characters_join_to_the_final_text(llm: LLM, num_tokens: int, seed: int) -> None:
    """Bytes of Chinese characters in any order, cut anywhere; 500 random sequences: tests/prompting."""
    allowed = byte_tokens(llm, "你好")
    params = SamplingParams(max_tokens=num_tokens, seq_seed=seed, allowed_token_ids=allowed, temperature=2.0)
    final = llm.generate([[4, 5]], params)[0].outputs[0]
    assert len(final.token_ids) == num_tokens
    assert final.text == llm.tokenizer.decode(final.token_ids)
    assert "".join(llm.stream([4, 5], params)) == final.text


def test_p16_no_piece_of_a_stream_holds_half_a_character(llm: LLM) -> None:
    """A flag, a family and Thai, which the model writes byte by byte because a grammar leaves it nothing else."""
    params = SamplingParams(max_tokens=60, seq_seed=1, so_args={"schema_type": "regex", "schema": CHARACTERS})
    pieces = list(llm.stream(f"Write {CHARACTERS}", params))
    assert "".join(pieces) == CHARACTERS
    assert not [piece for piece in pieces if REPLACEMENT in piece]
    assert len([piece for piece in pieces if piece]) > 3


def test_p16_a_stop_string_right_behind_half_a_character(llm: LLM) -> None:
    """The half is shown as one replacement mark, streamed or not, and the rank stops where the client does."""
    half, end = byte_tokens(llm, "你")[0], llm.tokenizer.encode_text("E")[0]
    params = SamplingParams(max_tokens=30, seq_seed=3, allowed_token_ids=(half, end), stop=("E",), min_tokens=2)
    out = llm.generate(["x"], params)[0].outputs[0]
    assert out.finish_reason == "stop"
    assert out.token_ids[-1] == end
    assert out.text == llm.tokenizer.decode(out.token_ids[:-1])
    assert set(out.text) <= {REPLACEMENT}
    assert "".join(llm.stream("x", params)) == out.text


def test_p27_a_thought_that_is_cut_leaves_empty_content(llm: LLM, tmp_path: Path) -> None:
    """Content is there and empty, the reason is length, and usage says that all was reasoning."""
    think_end = llm.tokenizer.control_id("</think>")
    never = {str(token): -100 for token in (think_end, llm.tokenizer.eos_token_id)}
    question = [{"role": "user", "content": "Why?"}]
    line = ask(llm, tmp_path, [row("cut", question, url=CHAT, max_tokens=6, logit_bias=never, seed=5)])["cut"]
    answer = choice(line)
    assert answer["finish_reason"] == "length"
    assert answer["message"]["content"] == ""
    assert answer["message"]["reasoning_content"]
    usage = line["response"]["body"]["usage"]
    assert usage["completion_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == 6


def test_p40_alternatives_under_a_grammar_are_strict_json(llm: LLM, tmp_path: Path) -> None:
    """Two tokens are allowed, twenty are asked for; `ask` reads every line strictly."""
    two = {"schema_type": "regex", "schema": "[ab]{4}"}
    message = [{"role": "user", "content": "ab?"}]
    chat_fields = {"thinking": False, "logprobs": True, "top_logprobs": 20}
    rows = [
        row("text", "ab?", max_tokens=6, seed=1, logprobs=20, so_args=two),
        row("chat", message, url=CHAT, max_tokens=6, seed=1, so_args=two, **chat_fields),
    ]
    lines = ask(llm, tmp_path, rows)
    assert not failed(lines)
    assert set(choice(lines["text"])["text"]) <= {"a", "b"}
    content = choice(lines["chat"])["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [20] * len(content)
    values = [top["logprob"] for entry in content for top in entry["top_logprobs"]]
    assert all(-9999.0 <= value <= 0.0 for value in values)
