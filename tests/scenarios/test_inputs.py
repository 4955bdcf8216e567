"""Inputs that have brought other engines down: wrong, empty, over-long, repeated and confusing rows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import FAKE_PROGRAM
from support.fake_engine import FAULT, MAX_MODEL_LEN, Fault, expected_tokens

from deepinfer.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.protocol import SamplingParams
from tests.doors.batch_files import row
from tests.scenarios.jobs import CHAT, ask, choice, failed

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

IMAGE = "<｜deepseek_image｜>"
SHORT = SamplingParams(max_tokens=2, seq_seed=1)


def test_p01_one_too_long_prompt_costs_its_own_row(llm: LLM) -> None:
    """50 prompts, number 17 twice as long as the context: 49 answers, one error, nothing raised."""
    prompts = [[1 + place % 50] * 4 for place in range(50)]
    prompts[17] = [5] * (2 * llm.max_model_len)
    outs = llm.generate(prompts, SHORT)
    assert [place for place, out in enumerate(outs) if out.error is not None] == [17]
    assert outs[17].error.code == "context_length_exceeded"
    assert f"{2 * llm.max_model_len} tokens" in str(outs[17].error)
    assert all(len(out.outputs[0].token_ids) in (1, 2) for out in outs if out.error is None)


def test_p02_the_longest_prompt_leaves_room_for_one_token(llm: LLM) -> None:
    """`model.max_model_len` caps prompt + output: limit - 1 is answered with one token, more is refused."""
    limit = llm.max_model_len
    outs = llm.generate([[3] * count for count in (limit - 1, limit, limit + 1)], SamplingParams(max_tokens=1))
    assert len(outs[0].outputs[0].token_ids) == 1
    assert outs[0].outputs[0].finish_reason in ("length", "stop")
    for out, count in zip(outs[1:], (limit, limit + 1), strict=True):
        assert out.error.code == "context_length_exceeded"
        assert f"the prompt has {count} tokens and the context is {limit} tokens long" in str(out.error)
    cut = llm.generate([[3] * (limit - 3)], SamplingParams(max_tokens=50, ignore_eos=True))[0].outputs[0]
    assert (len(cut.token_ids), cut.finish_reason) == (3, "length")


def test_p03_and_p05_empty_and_malformed_rows_in_the_middle_of_a_batch(llm: LLM, tmp_path: Path) -> None:
    """The tokenizer's and the chat encoder's refusals are row errors like any other."""
    good = [row(f"good-{place}", f"Row {place}", max_tokens=2) for place in range(6)]
    odd = [
        row("text-empty", "", max_tokens=2),
        row("text-space", " ", max_tokens=2),
        row("ids-empty", []),
        row("chat-empty", [], url=CHAT),
        row("content-number", [{"role": "user", "content": 7}], url=CHAT),
        row("role-unknown", [{"role": "pirate", "content": "hi"}], url=CHAT),
        row("image-without-url", [{"role": "user", "content": [{"type": "image_url"}]}], url=CHAT),
    ]
    lines = ask(llm, tmp_path, good[:3] + odd + good[3:])
    assert failed(lines) == {entry["custom_id"] for entry in odd[2:]}
    params = {name: lines[name]["error"]["param"] for name in failed(lines)}
    assert params == {
        "ids-empty": "prompt",
        "chat-empty": "messages",
        "content-number": "messages[0].content",
        "role-unknown": "messages[0].role",
        "image-without-url": "messages[0].content[0]",
    }
    assert lines["text-empty"]["response"]["body"]["usage"]["prompt_tokens"] == 1


def test_p07_two_jobs_at_once_share_their_ids(llm: LLM, tmp_path: Path) -> None:
    """Each gets the answers to its own prompts; within a job the later of two equal ids is refused (tests/doors)."""
    answers: dict[int, dict[str, dict[str, Any]]] = {}

    def job(number: int) -> None:
        rows = [row(f"r{place}", [number * 20 + place + 3], max_tokens=3, seed=place) for place in range(10)]
        answers[number] = ask(llm, tmp_path, rows, name=f"job-{number}")

    threads = [threading.Thread(target=job, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        prompts = [[number * 20 + place + 3] for place in range(10)]
        params = [SamplingParams(max_tokens=3, seq_seed=place) for place in range(10)]
        alone = [out.outputs[0].text for out in llm.generate(prompts, params)]
        assert [choice(answers[number][f"r{place}"])["text"] for place in range(10)] == alone
    texts = [[choice(line)["text"] for line in lines.values()] for lines in answers.values()]
    assert texts[0] != texts[1]


def test_p13_a_quoted_placeholder_is_text(llm: LLM, tmp_path: Path) -> None:
    """The literal of the image token, in a chat and in a plain prompt; the next turn can quote it again."""
    image_id = llm.tokenizer.control_id(IMAGE)
    question = {"role": "user", "content": f"Repeat this: {IMAGE}"}
    answer = {"role": "assistant", "content": IMAGE}
    chats: list[RequestOutput] = llm.chat([[question], [question, answer, question]], SHORT, thinking=False)
    plain = llm.generate([f"Repeat this: {IMAGE}"], SHORT)
    for out in [*chats, *plain]:
        assert out.error is None
        assert image_id not in out.prompt_token_ids
        assert IMAGE in llm.tokenizer.decode(out.prompt_token_ids)
    lines = ask(llm, tmp_path, [row("quoted", [question], url=CHAT, thinking=False, max_tokens=2)])
    assert not failed(lines)


def test_p14_a_half_sentence_is_continued(llm: LLM) -> None:
    """The prompt ends with the assistant's own words: no end token, no second turn; the answer is what follows."""
    messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "It is", "prefix": True}]
    out = llm.chat(messages, SHORT, thinking=False)[0]
    assert out.error is None
    assert llm.tokenizer.eos_token_id not in out.prompt_token_ids
    words = llm.tokenizer.encode_text("It is")
    assert out.prompt_token_ids[-len(words) :] == words
    again = llm.generate([out.prompt_token_ids], SHORT)[0]
    assert again.outputs[0].token_ids == out.outputs[0].token_ids
    finished = llm.chat([messages[0], {"role": "assistant", "content": "It is"}], SHORT, thinking=False)[0]
    assert finished.error.param == "messages[1]"


def test_p04_three_bad_rows_in_five_thousand(local_ray: None, cache_dir: Path, tmp_path: Path) -> None:
    """A prompt that is too long, one that no tokenizer can read and one that fails on its rank, far from each other."""
    rows = [row(f"r{place}", [1 + place % 200, place // 200 + 1], max_tokens=3) for place in range(5000)]
    rows[700]["body"]["prompt"] = [7] * (MAX_MODEL_LEN + 1)
    rows[2500]["body"]["prompt"] = [7, 10**6]
    rows[4321]["body"]["prompt"] = [FAULT, int(Fault.FAIL_REQUEST)]
    settings = {"accelerator": "cpu", "prefill.ranks": 1, "decode.ranks": 2, "cache_dir": str(cache_dir)}
    with LLM("tiny", settings=settings, rank_program=FAKE_PROGRAM) as engine:
        lines = ask(engine, tmp_path, rows)
        assert engine.status()["restarts"] == {"prefill": 0, "decode": 0}
        texts = {name: engine.tokenizer.decode(expected_tokens(prompt, 0, 0, 3)) for name, prompt in _prompts(rows)}
    assert {name: lines[name]["error"]["code"] for name in failed(lines)} == {
        "r700": "context_length_exceeded",
        "r2500": "invalid_value",
        "r4321": "numerics",
    }
    wrong = [name for name, line in lines.items() if line["response"] and choice(line)["text"] != texts[name]]
    assert not wrong


def _prompts(rows: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    return [(entry["custom_id"], entry["body"]["prompt"]) for entry in rows]
