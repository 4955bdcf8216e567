"""Parameter checks name the field and the value; seeds and bad words are what sampling.py's noise expects."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.protocol import SamplingParams
from deepinfer.scheduler.sampling_params import (
    bad_word_ids,
    check_sampling,
    derived_seed,
    is_greedy,
    resolve_seed,
)

VOCAB_SIZE = 100


def _check(**fields: object) -> SamplingParams:
    return check_sampling(SamplingParams(**fields), vocab_size=VOCAB_SIZE, max_logprobs=20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 16.0),
        ("max_tokens", None),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 1e39),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("stop", ("a", "")),
        ("stop", ""),
        ("stop", 3),
        ("stop", (3,)),
        ("stop_token_ids", (VOCAB_SIZE,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("1",)),
        ("stop_token_ids", 1),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
        ("skip_special_tokens", "yes"),
        ("n", 0),
        ("n", 10**9),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", -2),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", [5]),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (1, VOCAB_SIZE)),
        ("bad_words", ("",)),
        ("seq_seed", -1),
        ("seq_seed", 2**63),
        ("seq_seed", 1.0),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        _check(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: ")
    assert caught.value.code == "invalid_value"


def test_the_message_tells_value_and_range() -> None:
    with pytest.raises(RequestError, match=r"^top_p: 1\.5 is not allowed, use a number above 0 and up to 1$"):
        _check(top_p=1.5)
    with pytest.raises(RequestError, match=r"^n: 2 is not allowed, use 1 with temperature 0 "):
        _check(n=2, temperature=0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "top_p": 0.5, "top_k": -1, "min_p": 1.0},
        {"n": 16_384, "temperature": 1e-5},
        {"min_tokens": 16},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"stop_token_ids": (0, VOCAB_SIZE - 1), "allowed_token_ids": (0,), "logit_bias": {0: -100.0}},
        {"seq_seed": 2**63 - 1, "repetition_penalty": 1e-6},
    ],
)
def test_border_values_are_accepted_as_they_are(fields: dict[str, object]) -> None:
    assert _check(**fields) == SamplingParams(**fields)  # type: ignore[arg-type]


def test_the_whole_vocabulary_of_logprobs_needs_a_limit_that_allows_it() -> None:
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1)
    assert check_sampling(params, vocab_size=VOCAB_SIZE, max_logprobs=None) == params
    assert check_sampling(params, vocab_size=VOCAB_SIZE, max_logprobs=VOCAB_SIZE) == params


def test_types_become_plain_python() -> None:
    checked = _check(
        temperature=1, top_p=np.float64(0.5), max_tokens=np.int32(3), stop="xy", stop_token_ids=[4], logit_bias={1: 2}
    )
    assert checked.stop == ("xy",)
    assert checked.stop_token_ids == (4,)
    kinds = [type(value) for value in (checked.temperature, checked.top_p, checked.max_tokens)]
    assert kinds == [float, float, int]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(checked), type=SamplingParams) == checked


def test_greedy_begins_below_its_threshold() -> None:
    assert is_greedy(SamplingParams(temperature=0.0))
    assert is_greedy(SamplingParams(temperature=0.99e-5))
    assert not is_greedy(SamplingParams(temperature=1e-5))


def test_a_seed_is_drawn_only_when_there_is_none() -> None:
    assert resolve_seed(SamplingParams(), lambda: 77).seq_seed == 77
    assert resolve_seed(SamplingParams(seq_seed=0), lambda: 77).seq_seed == 0


def test_seeds_of_samples() -> None:
    assert derived_seed(42, 0) == 42
    assert derived_seed(42, 1) == 5989967046847025490
    assert derived_seed(42, 2) == 2936899242096595218


class _Letters:
    def encode_text(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_bad_words_are_banned_with_and_without_a_leading_space() -> None:
    assert bad_word_ids(("ab", " ab", "c"), _Letters()) == ((97, 98), (32, 97, 98), (99,), (32, 99))
    assert bad_word_ids((" ",), _Letters()) == ((32,),)
    assert bad_word_ids((), _Letters()) == ()
