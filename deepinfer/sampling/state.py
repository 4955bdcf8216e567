"""Sampling parameters of the running sequences, by slot: columns for what every row needs, lists for what few need."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.kernels.ops import GumbelArgmax
from deepinfer.kernels.reference.sampling import gumbel_argmax as reference_gumbel_argmax
from deepinfer.platforms.transfer import to_device
from deepinfer.protocol import SamplingParams
from deepinfer.scheduler.sampling_params import derived_seed, is_greedy, stop_ids
from deepinfer.structured_outputs.bitmask import StepMasks


@dataclass(slots=True, frozen=True)
class BadWords:
    """w token sequences whose last token must not complete them, int64 on the state's device.

    `beginnings` [w, longest - 1]: all but the last token, to the right, -1 before them; `last_ids`, `lengths` [w].
    """

    beginnings: Tensor
    last_ids: Tensor
    lengths: Tensor


@dataclass(slots=True, frozen=True)
class ScoreRules:
    """What changes the scores of a slot's rows before temperature. Id tensors are int64 on the state's device.

    `banned` [V] bool: ids outside `allowed_token_ids`, or None. `bias_ids`, `bias_values` [n] (float32).
    `stop_ids`: what `min_tokens` holds back.
    """

    num_prompt_tokens: int
    banned: Tensor | None
    bias_ids: Tensor
    bias_values: Tensor
    min_tokens: int
    stop_ids: Tensor
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bad_words: BadWords | None


@dataclass(slots=True, frozen=True)
class Truncation:
    """Of a slot that cuts the unlikely ids off: its `top_k`, 0 = off, and whether it has a top_p."""

    top_k: int
    with_top_p: bool


@dataclass(slots=True, frozen=True)
class DrawColumns:
    """How one slot draws: its entries of `SamplingState`'s columns."""

    seed: int
    temperature: float
    top_k: int
    top_p: float
    log_min_p: float


class SamplingState:
    """Per-slot sampling parameters. Slot 0 of padding rows is greedy and has no rules.

    Columns by slot [num_slots] on `device`: `seeds` int64 (of the slot's first sample), `temperatures` float32 (0 where
    greedy), `top_k` int64 (`vocab_size` or more = off), `top_p` float64 (1 = off), `log_min_p` float32 (-inf = off).
    On the host, of the slots that have them: `rules`, `num_logprobs` (-1 = whole vocabulary), `truncating`;
    `draw_seeds` = the seeds of a slot's samples. `masks` = what grammars allow in the step that draws now, else None.
    `gumbel_argmax` draws for drafts and targets alike: they share noise only if it is the same function.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        *,
        eos_token_id: int,
        gumbel_argmax: GumbelArgmax = reference_gumbel_argmax,
    ) -> None:
        self.gumbel_argmax = gumbel_argmax
        self.vocab_size = vocab_size
        self.device = device
        self.eos_token_id = eos_token_id
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.full((num_slots,), vocab_size, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float64, device=device)
        self.log_min_p = torch.full((num_slots,), -math.inf, dtype=torch.float32, device=device)
        self.rules: dict[int, ScoreRules] = {}
        self.num_logprobs: dict[int, int] = {}
        self.truncating: dict[int, Truncation] = {}
        self.draw_seeds: dict[int, tuple[int, ...]] = {}
        self.masks: StepMasks | None = None

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        *,
        num_prompt_tokens: int,
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        first_sample: int = 0,
        num_samples: int = 1,
    ) -> DrawColumns:
        """Give the slot to a sequence, whatever it was before, and return what `write` has to put into its columns.

        `params` have passed `check_sampling` and carry a seed. `bad_word_ids` come from
        `scheduler.sampling_params.bad_word_ids`. The rows of the slot draw for the sample numbers
        `first_sample .. first_sample + num_samples - 1`.
        """
        assert slot > 0, "slot 0 is for padding rows"
        seed = params.seq_seed
        assert seed is not None, "the driver resolves the seed"
        for part in (self.rules, self.num_logprobs, self.truncating):
            part.pop(slot, None)
        self.draw_seeds[slot] = tuple(derived_seed(seed, first_sample + number) for number in range(num_samples))
        if _has_rules(params) or bad_word_ids:
            self.rules[slot] = self._build_rules(params, num_prompt_tokens, bad_word_ids)
        if params.logprobs is not None:
            self.num_logprobs[slot] = params.logprobs
        columns = self._columns(params, self.draw_seeds[slot][0])
        has_top_k, has_top_p = columns.top_k < self.vocab_size, columns.top_p < 1.0
        if has_top_k or has_top_p or columns.log_min_p > -math.inf:
            self.truncating[slot] = Truncation(columns.top_k if has_top_k else 0, has_top_p)
        return columns

    def write(self, slots: Tensor, columns: dict[str, Tensor]) -> None:
        """Put values [n] into the columns at different `slots` [n]; by field of `DrawColumns`."""
        self.seeds[slots] = columns["seed"]
        self.temperatures[slots] = columns["temperature"].to(torch.float32)
        self.top_k[slots] = columns["top_k"]
        self.top_p[slots] = columns["top_p"]
        self.log_min_p[slots] = columns["log_min_p"].to(torch.float32)

    def _columns(self, params: SamplingParams, seed: int) -> DrawColumns:
        if is_greedy(params):
            return DrawColumns(seed, 0.0, self.vocab_size, 1.0, -math.inf)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        return DrawColumns(seed, params.temperature, top_k, params.top_p, log_min_p)

    def _build_rules(
        self, params: SamplingParams, num_prompt_tokens: int, bad_words: tuple[tuple[int, ...], ...]
    ) -> ScoreRules:
        banned = None
        if params.allowed_token_ids is not None:
            allowed = np.zeros(self.vocab_size, np.bool_)
            allowed[list(params.allowed_token_ids)] = True
            banned = to_device(~allowed, self.device)
        bias = params.logit_bias or {}
        return ScoreRules(
            num_prompt_tokens=num_prompt_tokens,
            banned=banned,
            bias_ids=self._ids(tuple(bias)),
            bias_values=to_device(np.array(list(bias.values()), np.float32), self.device),
            min_tokens=params.min_tokens,
            stop_ids=self._ids(stop_ids(params, self.eos_token_id)),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bad_words=self._bad_words(bad_words) if bad_words else None,
        )

    def _bad_words(self, words: tuple[tuple[int, ...], ...]) -> BadWords:
        longest = max(len(word) for word in words)
        beginnings: npt.NDArray[np.int64] = np.full((len(words), longest - 1), -1, np.int64)
        for row, word in zip(beginnings, words, strict=True):
            row[longest - len(word) :] = word[:-1]
        return BadWords(
            beginnings=to_device(beginnings, self.device),
            last_ids=self._ids(tuple(word[-1] for word in words)),
            lengths=self._ids(tuple(len(word) for word in words)),
        )

    def _ids(self, token_ids: tuple[int, ...]) -> Tensor:
        return to_device(np.array(token_ids, np.int64), self.device)


def draw_column_arrays(columns: list[DrawColumns]) -> dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]:
    """Return the columns of several slots as arrays by field: int64 or float64."""
    return {field.name: np.array([getattr(one, field.name) for one in columns]) for field in fields(DrawColumns)}


def _has_rules(params: SamplingParams) -> bool:
    return (
        params.allowed_token_ids is not None
        or bool(params.logit_bias)
        or params.min_tokens > 0
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
