"""Sampling parameters before they reach a rank: validation, the seed, and the token ids of bad words.

Ranges and meanings follow the parameters of vLLM's `SamplingParams`. Where a range is open upwards there, a bound is
set here, so that no accepted value can overflow the float32 arithmetic of the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from deepinfer.errors import RequestError, shown
from deepinfer.protocol import SamplingParams

GREEDY_BELOW = 1e-5  # a temperature below this takes the most likely token
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 1e-6
MAX_REPETITION_PENALTY = 1e6
MAX_SAMPLES = 16_384
MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1

_FLOAT_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}
_INT_RANGES: dict[str, tuple[int, int]] = {
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "top_k": (-1, MAX_TOKENS),
    "n": (1, MAX_SAMPLES),
}
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


class TextEncoder(Protocol):
    """The part of a tokenizer that bad words need."""

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of plain text."""
        ...


def check_sampling(params: SamplingParams, *, vocab_size: int, max_logprobs: int | None) -> SamplingParams:
    """Return `params` with plain Python types (a lone stop string becomes a tuple of one), every rule checked.

    `max_logprobs` limits `logprobs` and `prompt_logprobs`; None allows up to the vocabulary. -1 there counts as the
    whole vocabulary. `so_args` is left to `schema_check`. Raises RequestError with `param` = the field, and a message
    with the field, value and range.
    """
    fields: dict[str, object] = {}
    for name, (low, high) in _FLOAT_RANGES.items():
        fields[name] = _number(name, getattr(params, name), low, high)
    for name, (lowest, highest) in _INT_RANGES.items():
        fields[name] = _integer(name, getattr(params, name), lowest, highest)
    for name in _FLAGS:
        fields[name] = _flag(name, getattr(params, name))
    for name in ("stop", "bad_words"):
        fields[name] = _strings(name, getattr(params, name))
    fields["stop_token_ids"] = _token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.allowed_token_ids is not None:
        fields["allowed_token_ids"] = _token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    fields["logit_bias"] = _logit_bias(params.logit_bias, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        fields[name] = _num_logprobs(name, getattr(params, name), vocab_size, max_logprobs)
    if params.seq_seed is not None:
        fields["seq_seed"] = _integer("seq_seed", params.seq_seed, 0, MAX_SEED)
    checked = msgspec.structs.replace(params, **fields)
    _check_together(checked)
    return checked


def is_greedy(params: SamplingParams) -> bool:
    """Return whether the most likely token is taken: top_p, top_k, min_p and the seed are then without effect."""
    return params.temperature < GREEDY_BELOW


def stop_ids(params: SamplingParams, eos_token_id: int) -> tuple[int, ...]:
    """Return the token ids that end a sequence once `min_tokens` output tokens stand before them."""
    return params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, eos_token_id)


def resolve_seed(params: SamplingParams, draw: Callable[[], int]) -> SamplingParams:
    """Return `params` with a seed: its own, or one from `draw()`, which gives 63 random bits."""
    if params.seq_seed is not None:
        return params
    seed = draw()
    assert 0 <= seed <= MAX_SEED, seed
    return msgspec.structs.replace(params, seq_seed=seed)


def bad_word_ids(words: Sequence[str], encoder: TextEncoder) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell `words`, each with and without a leading space, without repeats."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        spellings = (bare, " " + bare) if bare else (word,)
        for spelling in spellings:
            sequences[tuple(encoder.encode_text(spelling))] = None
    return tuple(sequences)


def derived_seed(seed: int, sample: int) -> int:
    """Return the seed of sample number `sample` of a request with `seed`: the seed itself for sample 0.

    Others take 63 bits of Philox4x32-10 at counter (sample, 0x5eed, 0, 0); `sampling.noise.derived_seeds` agrees.
    """
    assert 0 <= seed <= MAX_SEED, seed
    if sample == 0:
        return seed
    low, high, _, _ = _philox((sample, 0x5EED, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return (low | high << 32) & MAX_SEED


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one counter (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _refuse(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name}: {shown(value)} is not allowed, use {expected}", code="invalid_value", param=name)


def _number(name: str, value: object, low: float, high: float) -> float:
    expected = f"a number from {low:g} to {high:g}" if name != "top_p" else "a number above 0 and up to 1"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _refuse(name, value, expected)
    if not low <= value <= high or (name == "top_p" and value == 0):  # a NaN is never in a range
        raise _refuse(name, value, expected)
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise _refuse(name, value, f"an integer from {low} to {high}")
    return int(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)):
        raise _refuse(name, value, "a list of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _refuse(name, string, "strings of at least one character")
    return tuple(strings)


def _token_ids(name: str, value: object, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise _refuse(name, value, "a list of token ids")
    if name == "allowed_token_ids" and not value:
        raise _refuse(name, value, "at least one token id, or leave it out")
    return tuple(_integer(name, token_id, 0, vocab_size - 1) for token_id in value)


def _logit_bias(value: object, vocab_size: int) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", value, "a map from token id to a number")
    return {
        _integer("logit_bias", token_id, 0, vocab_size - 1): _number("logit_bias", bias, -100.0, 100.0)
        for token_id, bias in value.items()
    }


def _num_logprobs(name: str, value: object, vocab_size: int, max_logprobs: int | None) -> int | None:
    if value is None:
        return None
    limit = vocab_size if max_logprobs is None else min(max_logprobs, vocab_size)
    lowest = -1 if limit == vocab_size else 0
    return _integer(name, value, lowest, limit)


def _check_together(params: SamplingParams) -> None:
    """Raise RequestError for fields that are right alone and wrong together."""
    if params.min_tokens > params.max_tokens:
        raise _refuse("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    if params.n > 1 and is_greedy(params):
        raise _refuse(
            "n", params.n, f"1 with temperature {params.temperature:g} (greedy samples are all equal), or a higher one"
        )
