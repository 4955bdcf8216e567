"""Rows that other engines have garbled while they drafted, or answered differently when asked again.

No Ray: rank engines of the tiny model, in the place of its drafter an oracle that is right three times of four.
"""

from __future__ import annotations

import json
import random
import string
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.answer_bits import answer_bits
from support.oracle import Accepted, OracleDrafter
from support.rank_engines import Answer, answer_all, make_request
from support.tiny_ranks import build_tiny_rank

from deepinfer.codec import unpack
from deepinfer.protocol import OutputFormat, Request
from deepinfer.runtime.build_drafts import MakeDrafter
from deepinfer.schema_check import grammar_of_so_args
from deepinfer.tokenizer import OutputParser, Tokenizer

OFF = "speculative.max_draft_tokens=0"
BLOCK = 16  # `cache.block_size` of the tiny ranks, and the model's window too
RING = 28  # that window and 12: the kept suffix of a prompt
SIXTEEN = ("prefill.max_running=16", "decode.max_running=16")
LABELS = ("spam", "news", "bill")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def _answers(
    directory: Path, requests: list[Request], *settings: str, make_drafter: MakeDrafter | None = None
) -> dict[int, Answer]:
    prefill = build_tiny_rank("prefill", directory, *settings)
    answers = answer_all(prefill, build_tiny_rank("decode", directory, *settings, make_drafter=make_drafter), requests)
    assert all(answer.failure is None and answer.finish for answer in answers.values()), answers
    return answers


def _tokens(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {index: answer.token_ids for index, answer in answers.items()}


def _known(requests: list[Request], answers: dict[int, Answer]) -> list[list[int]]:
    return [unpack(request.prompt_token_ids).tolist() + answers[request.index].token_ids for request in requests]


def _oracle(tokenizer: Tokenizer, requests: list[Request], answers: dict[int, Answer]) -> MakeDrafter:
    return partial(
        OracleDrafter,
        sequences=_known(requests, answers),
        hit_rate=0.75,
        vocab_size=tokenizer.vocab_size,
        log=Accepted(),
    )


class ControlDrafter(OracleDrafter):
    """Drafts the truth, but a control token at every third place."""

    control_ids: tuple[int, ...] = ()

    def _tell(self, number: int, place: int, known: list[int]) -> int:
        control_id = self.control_ids[place // 3 % len(self.control_ids)]
        return super()._tell(number, place, known) if place % 3 else control_id


def _control_drafter(
    tokenizer: Tokenizer, control_ids: tuple[int, ...], requests: list[Request], answers: dict[int, Answer]
) -> MakeDrafter:
    kind = type("Drafter", (ControlDrafter,), {"control_ids": control_ids})
    return partial(
        kind,
        sequences=_known(requests, answers),
        hit_rate=1.0,
        vocab_size=tokenizer.vocab_size,
        log=Accepted(),
    )


def _text(tokenizer: Tokenizer, token_ids: list[int], **options: Any) -> str:
    parser = OutputParser(tokenizer, OutputFormat(kind="text"), **options)
    for token_id in token_ids:
        parser.push(token_id)
    return parser.finish("length").content


def _control_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    names = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<|EOT|>")
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, *map(tokenizer.control_id, names)]
    assert None not in ids
    return tuple(control_id for control_id in ids if control_id is not None)


def test_p26_control_tokens_that_are_only_drafted_are_never_seen(directory: Path, tokenizer: Tokenizer) -> None:
    """P26: the beginning and the end of a sequence, a role or a thought, drafted in mid answer, change nothing."""
    control_ids = _control_ids(tokenizer)
    bias = dict.fromkeys(control_ids, -100.0)  # the target draws none of them
    prompts = [tokenizer.encode_text(text) for text in ("Hello world", "What is the capital", "You know that", "Go")]
    requests = [
        make_request(place, prompt, max_tokens=30, temperature=float(place % 2), ignore_eos=False, logit_bias=bias)
        for place, prompt in enumerate(prompts)
    ]
    plain = _answers(directory, requests, OFF)
    drafted = _answers(directory, requests, make_drafter=_control_drafter(tokenizer, control_ids, requests, plain))
    assert _tokens(drafted) == _tokens(plain)
    for answer in drafted.values():
        assert 0 < answer.num_accepted < answer.num_drafted
        assert len(answer.token_ids) == 30
        assert not set(answer.token_ids) & set(control_ids)
        text = _text(tokenizer, answer.token_ids, skip_special_tokens=False)
        assert not [control_id for control_id in control_ids if tokenizer.token_text(control_id) in text]


def test_p26_a_begin_token_that_the_target_draws_is_kept_and_not_shown(directory: Path, tokenizer: Tokenizer) -> None:
    """P26: it is a token of the answer like any other, drafted or not; text shows it only on demand."""
    bos = tokenizer.bos_token_id
    letters = [tokenizer.encode_text(letter)[0] for letter in "abc"]
    request = make_request(0, letters, max_tokens=40, allowed_token_ids=(bos, *letters), logit_bias={bos: 1.5})
    plain = _answers(directory, [request], OFF)
    drafted = _answers(directory, [request], make_drafter=_control_drafter(tokenizer, (bos,), [request], plain))
    assert _tokens(drafted) == _tokens(plain)
    token_ids = drafted[0].token_ids
    assert 5 < token_ids.count(bos) < 35
    assert drafted[0].num_accepted > 10
    shown = "".join(tokenizer.token_text(token_id) for token_id in token_ids if token_id != bos)
    assert _text(tokenizer, token_ids) == shown
    assert tokenizer.token_text(bos) in _text(tokenizer, token_ids, skip_special_tokens=False)


def test_p30_sixteen_seeds_and_one_greedy_text(directory: Path, tokenizer: Tokenizer) -> None:
    """P30: four prompts under sixteen seeds in one drafted batch; each says what it says alone with no seed of its own.

    Rows that draw, with the same seeds, run among them.
    """
    prompts = [tokenizer.encode_text(text) for text in ("Hello world", "What is it", "You may think so", "I")]
    alone = [
        make_request(100 + place, prompt, temperature=0.0, seq_seed=0, max_tokens=9)
        for place, prompt in enumerate(prompts)
    ]
    expected = _answers(directory, alone, OFF)
    seeded = [
        make_request(2 * row, prompts[row % 4], temperature=0.0, seq_seed=977 * row + 1, max_tokens=9)
        for row in range(16)
    ]
    drawing = [make_request(2 * row + 1, prompts[row % 4], seq_seed=977 * row + 1, max_tokens=9) for row in range(16)]
    drawn = _answers(directory, drawing, OFF, *SIXTEEN)
    make_drafter = _oracle(tokenizer, [*alone, *drawing], expected | drawn)
    greedy = {request.index: expected[100 + row % 4].token_ids for row, request in enumerate(seeded)}
    for drafter in (make_drafter, None):
        mixed = [request for pair in zip(seeded, drawing, strict=True) for request in pair]
        answers = _answers(directory, mixed, *SIXTEEN, make_drafter=drafter)
        assert _tokens(answers) == greedy | _tokens(drawn)
        assert drafter is None or sum(answer.num_accepted for answer in answers.values()) > 60
    assert len({tuple(answer.token_ids) for answer in (expected | drawn).values()}) > 16


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_p32_a_job_of_64_rows_is_repeated_to_the_bit(directory: Path) -> None:
    """P32: five times the same 64 rows, greedy and drawing, with drafts, in five orders; every bit is equal."""
    numbers = random.Random(32)
    prompts = [[numbers.randrange(3, 400) for _ in range(numbers.randrange(1, 30))] for _ in range(64)]
    requests = [
        make_request(row, prompt, max_tokens=4, temperature=float(row % 2), seq_seed=row, logprobs=3)
        for row, prompt in enumerate(prompts)
    ]
    settings = ("determinism.batch_invariant=true", "prefill.max_running=7", "decode.max_running=64")
    first, _ = answer_bits(*(build_tiny_rank(role, directory, *settings) for role in ("prefill", "decode")), requests)
    assert all(len(bits.token_ids) == 4 for bits in first.values())
    for _ in range(4):
        numbers.shuffle(requests)
        ranks = [build_tiny_rank(role, directory, *settings) for role in ("prefill", "decode")]
        again, _ = answer_bits(*ranks, requests)
        assert again == first


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_p33_copies_of_a_labelling_row_get_one_label(directory: Path, tokenizer: Tokenizer, count: int) -> None:
    """P33: one answer, to the bit of its log-probabilities, whatever else is labelled at the same time."""
    grammar = grammar_of_so_args({"schema_type": "json", "schema": {"enum": list(LABELS)}})
    mail, numbers = tokenizer.encode_text("What is this? You have one new bill."), random.Random(5)
    # A random model would fill the answer with as much white space as the grammar lets it.
    bias = {tokenizer.encode_text(space)[0]: -100.0 for space in " \t\n\r"}
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": False, "logprobs": 2, "logit_bias": bias}
    copies = [make_request(row, mail, temperature=0.0, **options) for row in range(count)]
    others = [
        make_request(count + row, mail[: numbers.randrange(1, len(mail))], **options) for row in range(count // 4)
    ]
    requests = [msgspec.structs.replace(request, grammar=grammar) for request in copies + others]
    numbers.shuffle(requests)
    settings = ("determinism.batch_invariant=true", "prefill.max_running=5", "decode.max_running=16")
    prefill, decode = (build_tiny_rank(role, directory, *settings) for role in ("prefill", "decode"))
    found, _ = answer_bits(prefill, decode, requests)
    assert len({found[row] for row in range(count)}) == 1
    labels = {json.loads(tokenizer.decode(bits.token_ids)) for bits in found.values()}
    assert 1 < len(labels) <= len(LABELS)


def test_p38_paths_to_be_copied_are_the_same_with_drafts_and_without(directory: Path, tokenizer: Tokenizer) -> None:
    """P38: thirty random paths. A random model copies none of them, but drops or swaps no token under drafts either."""
    numbers = random.Random(38)
    words = ["".join(numbers.choices(string.ascii_letters + "_-.", k=numbers.randrange(2, 8))) for _ in range(40)]
    prompts = [
        tokenizer.encode_text("Write this again: /" + "/".join(numbers.choices(words, k=numbers.randrange(1, 5))))
        for _ in range(30)
    ]
    requests = [make_request(row, prompt, max_tokens=16, temperature=0.0) for row, prompt in enumerate(prompts)]
    plain = _answers(directory, requests, OFF, *SIXTEEN)
    drafted = _answers(directory, requests, *SIXTEEN, make_drafter=_oracle(tokenizer, requests, plain))
    assert _tokens(drafted) == _tokens(plain)
    assert sum(answer.num_accepted for answer in drafted.values()) > 200
    assert len({tuple(answer.token_ids) for answer in plain.values()}) > 20


@pytest.mark.parametrize("max_running", [1, 8])
def test_p41_a_prompt_sent_twice_is_answered_twice(directory: Path, max_running: int) -> None:
    """P41: lengths around borders of blocks and of the window; the second copy runs behind the first or beside it."""
    numbers = random.Random(41)
    edges = (BLOCK, RING, 2 * BLOCK)
    lengths = [edge + offset for edge in edges for offset in (-1, 0, 1)]
    prompts = [[numbers.randrange(3, 400) for _ in range(length)] for length in lengths]
    requests = [
        make_request(2 * place + copy, prompt, max_tokens=3, temperature=float(place % 2), seq_seed=place)
        for place, prompt in enumerate(prompts)
        for copy in (0, 1)
    ]
    settings = (f"prefill.max_running={max_running}", f"decode.max_running={max_running}")
    tokens = _tokens(_answers(directory, requests, *settings))
    first, second = ([tokens[2 * place + copy] for place in range(len(lengths))] for copy in (0, 1))
    assert first == second
    assert all(len(token_ids) == 3 for token_ids in first)
    assert len(set(map(tuple, first))) == len(lengths)
