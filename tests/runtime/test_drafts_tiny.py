"""Drafts with the tiny model: its own draft stages, and an oracle in their place, change no bit of an answer."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.oracle import Accepted, OracleDrafter
from support.processes import RankPlace, run_processes
from support.rank_engines import Answer, answer_all, answer_rounds
from support.tiny_ranks import VOCAB_SIZE, build_tiny_rank, tiny_requests, with_sampling

from deepinfer.codec import unpack
from deepinfer.errors import ConfigError
from deepinfer.protocol import FinishCode, Request
from deepinfer.runtime.build_drafts import MakeDrafter
from deepinfer.speculative.cost_table import read_table
from deepinfer.tokenizer import Tokenizer

RING = 28  # the tiny model's window of 16, and 12
OFF = "speculative.max_draft_tokens=0"
LENGTHS = [1, 15, 17, 49]


def _requests(lengths: list[int] = LENGTHS, **sampling: Any) -> list[Request]:
    return tiny_requests(lengths, **{"logprobs": 3} | sampling)


def _answer(
    directory: Path, requests: list[Request], *settings: str, make_drafter: MakeDrafter | None = None
) -> dict[int, Answer]:
    prefill = build_tiny_rank("prefill", directory, *settings)
    decode = build_tiny_rank("decode", directory, *settings, make_drafter=make_drafter)
    answers = answer_all(prefill, decode, requests)
    assert all(answer.failure is None and answer.finish for answer in answers.values()), answers
    return answers


def _visible(answers: dict[int, Answer]) -> dict[int, tuple[Any, ...]]:
    """Tokens, ends and log-probabilities to the bit."""
    return {
        index: (answer.token_ids, answer.finish, b"".join(part.values for part in answer.logprobs))
        for index, answer in answers.items()
    }


def _oracle(
    requests: list[Request], answers: dict[int, Answer], hit_rate: float, log: Accepted | None = None
) -> MakeDrafter:
    known = [unpack(request.prompt_token_ids).tolist() + answers[request.index].token_ids for request in requests]
    return partial(OracleDrafter, sequences=known, hit_rate=hit_rate, vocab_size=VOCAB_SIZE, log=log or Accepted())


@pytest.fixture(scope="module")
def plain(directory: Path) -> dict[int, Answer]:
    return _answer(directory, _requests(), OFF)


@pytest.mark.parametrize(
    "settings",
    [
        ("speculative.max_draft_tokens=5",),
        ("speculative.max_draft_tokens=2", "scheduler.asynchronous=false"),
        ("speculative.max_draft_tokens=5", "decode.max_running=2"),
    ],
)
def test_the_models_own_drafts_change_nothing(
    directory: Path, plain: dict[int, Answer], settings: tuple[str, ...]
) -> None:
    drafted = _answer(directory, _requests(), *settings)
    assert _visible(drafted) == _visible(plain)
    assert sum(answer.num_drafted for answer in drafted.values()) > 30


@pytest.mark.parametrize(("hit_rate", "asynchronous"), [(0.75, True), (0.75, False), (1.0, True)])
def test_accepted_drafts_change_nothing(
    directory: Path, plain: dict[int, Answer], hit_rate: float, asynchronous: bool
) -> None:
    """P29: drawn tokens too are those of their seed, to the bit of their log-probabilities."""
    requests, log = _requests(), Accepted()
    make_drafter = _oracle(requests, plain, hit_rate, log)
    setting = f"scheduler.asynchronous={str(asynchronous).lower()}"
    drafted = _answer(directory, requests, setting, make_drafter=make_drafter)
    assert _visible(drafted) == _visible(plain)
    assert log.committed_per_pass > 2
    assert sum(answer.num_accepted for answer in drafted.values()) > 15


@pytest.mark.slow
def test_runs_of_every_length_are_undone_at_every_alignment(directory: Path) -> None:
    """Accepted lengths 0 .. 5 at even and odd anchors, in a ring's first turn and where it wraps."""
    requests = _requests([1, 4, 11, 20, 23, 30, 50, 77], max_tokens=110, ignore_eos=True, logprobs=None)
    plain, log = _answer(directory, requests, OFF), Accepted()
    drafted = _answer(directory, requests, make_drafter=_oracle(requests, plain, 0.75, log))
    assert _visible(drafted) == _visible(plain)
    groups = log.histogram(lambda anchor: (anchor % 2, "wraps" if anchor % RING >= RING - 6 else "within"))
    assert len(groups) == 4
    assert all(set(counts) == set(range(6)) for counts in groups.values()), groups


def test_preempted_sequences_come_to_the_same_answers(directory: Path) -> None:
    settings = ("model.max_model_len=144", "cache.block_size=2")
    requests = _requests([60, 62], max_tokens=20, logprobs=None)
    plain = _answer(directory, requests, OFF, *settings)
    with pytest.raises(ConfigError, match="bytes are needed") as refused:
        build_tiny_rank("decode", directory, *settings, "cache.memory_bytes=1")
    smallest = int(str(refused.value).split(": ")[1].split()[0])
    for make_drafter in (None, _oracle(requests, plain, 0.75)):
        decode = build_tiny_rank(
            "decode", directory, *settings, f"cache.memory_bytes={smallest}", make_drafter=make_drafter
        )
        answers = answer_all(build_tiny_rank("prefill", directory, *settings), decode, requests)
        assert sum(answer.num_preemptions for answer in answers.values()) > 0
        assert _visible(answers) == _visible(plain)


def test_rules_and_truncation_hold_within_a_run(directory: Path) -> None:
    rules = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "top_p": 0.8, "top_k": 40, "min_tokens": 5, "n": 2}
    requests = [
        msgspec.structs.replace(request, index=2 * place)
        for place, request in enumerate(
            _requests([5, 5, 18], max_tokens=14, temperature=0.8, logit_bias={7: 2.0}, **rules)
        )
    ]
    plain = _answer(directory, requests, OFF)
    assert _visible(_answer(directory, requests)) == _visible(plain)


def test_varying_lengths_change_nothing_and_costs_are_measured_once(
    directory: Path, plain: dict[int, Answer], tmp_path: Path
) -> None:
    settings = ("speculative.varlen=true", f"cache_dir={tmp_path}", "decode.max_running=2")
    requests = _requests()
    for make_drafter in (None, _oracle(requests, plain, 0.75)):
        assert _visible(_answer(directory, requests, *settings, make_drafter=make_drafter)) == _visible(plain)
    (file,) = (tmp_path / "step_costs").iterdir()
    table = read_table(file)
    assert table is not None
    assert (table.num_sequences, table.num_drafts) == ((1, 2), (0, 1, 3, 5))
    assert all(seconds > 0 for row in (*table.seconds, table.plain_seconds) for seconds in row)
    assert len(table.plain_seconds) == 2


def _work(place: RankPlace, task: tuple[Path, list[list[Request]], dict[int, Answer] | None, list[str]]) -> Any:
    directory, by_rank, known, settings = task
    requests = [request for part in by_rank for request in part]
    make_drafter = None if known is None else _oracle(requests, known, 0.75)
    prefill = build_tiny_rank("prefill", directory, place=place)
    decode = build_tiny_rank("decode", directory, *settings, place=place, make_drafter=make_drafter)
    return answer_rounds(place, prefill, decode, [by_rank[place.rank]])


@pytest.mark.parametrize(("with_oracle", "varlen"), [(False, False), (True, True)])
def test_a_group_gives_the_tokens_of_one_rank(directory: Path, tmp_path: Path, with_oracle: bool, varlen: bool) -> None:
    """Two ranks with spread experts, also those of the draft stages; the second has little to do and drafts along."""
    requests = _requests([1, 17, 40], logprobs=None, max_tokens=8)
    plain = _answer(directory, requests, OFF)
    by_rank = [requests[:2], requests[2:]]
    settings = [f"speculative.varlen={str(varlen).lower()}", f"cache_dir={tmp_path}", "decode.max_running=2"]
    results = run_processes(_work, 2, (directory, by_rank, plain if with_oracle else None, settings))
    merged = {index: tokens for part in results for index, tokens in part.items()}
    assert merged == {index: answer.token_ids for index, answer in plain.items()}


def test_greedy_answers_do_not_depend_on_the_verifier(directory: Path, plain: dict[int, Answer]) -> None:
    """The draws of others follow the same distribution, not the same numbers; see tests/speculative."""
    drafted = _answer(directory, _requests(), "speculative.verifier=rejection")
    greedy = [request.index for request in _requests() if request.sampling.temperature == 0]
    assert len(greedy) == 2
    assert [_visible(drafted)[index] for index in greedy] == [_visible(plain)[index] for index in greedy]
    assert Counter(len(answer.token_ids) for answer in drafted.values()) == Counter(
        len(answer.token_ids) for answer in plain.values()
    )


def test_a_stop_string_ends_an_accepted_run_wherever_it_is_completed(directory: Path) -> None:
    """P17: Drafts that are always right: the string is complete at the first, a middle or the last token of a run."""
    tokenizer = Tokenizer.from_directory(directory)
    (request,) = _requests([12], max_tokens=24, temperature=1.0, ignore_eos=True, logprobs=None)
    whole = _answer(directory, [request], OFF)
    token_ids = whole[0].token_ids
    texts = [tokenizer.decode(token_ids[place - 1 : place + 1]) for place in range(3, 8)]
    stopping = [
        msgspec.structs.replace(with_sampling(request, stop=(text,)), index=index, request_id=f"stops-{index}")
        for index, text in enumerate(text for text in texts if "�" not in text and text.strip())
    ]
    plain = _answer(directory, stopping, OFF)
    drafted = _answer(directory, stopping, make_drafter=_oracle([request], whole, 1.0))
    assert _visible(drafted) == _visible(plain)
    for index, answer in plain.items():
        assert answer.finish is FinishCode.STOP
        assert drafted[index].num_accepted <= len(answer.token_ids) - 2
    assert len({len(answer.token_ids) for answer in plain.values()}) >= 3
