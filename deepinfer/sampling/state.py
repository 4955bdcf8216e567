"""Sampling parameters of the running sequences, by slot: columns for what every row needs, lists for what few need."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import GumbelArgmax
from deepinfer.kernels.reference.sampling import gumbel_argmax as reference_gumbel_argmax
from deepinfer.protocol import SamplingParams
from deepinfer.scheduler.sampling_params import is_greedy, stop_ids
from deepinfer.structured_outputs.bitmask import StepMasks


@dataclass(slots=True, frozen=True)
class ScoreRules:
    """What changes the scores of a slot's rows before temperature. Id tensors are int64 on the state's device.

    `banned` [V] bool: ids outside `allowed_token_ids`, or None. `bias_ids`, `bias_values` [n] (float32).
    `stop_ids`: what `min_tokens` holds back. `bad_words`: token sequences whose last token must not complete them.
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
    bad_words: tuple[tuple[int, ...], ...]


class SamplingState:
    """Per-slot sampling parameters. A free slot, and slot 0 of padding rows, is greedy and has no rules.

    Columns by slot [num_slots] on `device`: `seeds` int64, `temperatures` float32 (1 where greedy), `greedy` bool,
    `top_k` int64 (`vocab_size` or more = off), `top_p` float64 (1 = off), `log_min_p` float32 (-inf = off).
    On the host: `rules` and `num_logprobs` of the slots that have them (-1 = whole vocabulary), `truncating` and
    `drawing` = slots with top_k, top_p or min_p, and slots that are not greedy; `samples` = their sample numbers.
    `masks` = what grammars allow in the present step. `gumbel_argmax` draws for drafts and targets alike: they share
    noise only if it is the same function.
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
        self.temperatures = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.greedy = torch.ones(num_slots, dtype=torch.bool, device=device)
        self.top_k = torch.full((num_slots,), vocab_size, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float64, device=device)
        self.log_min_p = torch.full((num_slots,), -math.inf, dtype=torch.float32, device=device)
        self.rules: dict[int, ScoreRules] = {}
        self.num_logprobs: dict[int, int] = {}
        self.samples: dict[int, range] = {}
        self.truncating: set[int] = set()
        self.drawing: set[int] = set()
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
    ) -> None:
        """Give a free slot the parameters of a sequence; they have passed `check_sampling` and carry a seed.

        `bad_word_ids` come from `scheduler.sampling_params.bad_word_ids`. The rows of the slot draw for the sample
        numbers `first_sample .. first_sample + num_samples - 1`, afterwards found in `samples`.
        """
        assert slot > 0, "slot 0 is for padding rows"
        assert slot not in self.samples, f"slot {slot} is taken"
        assert params.seq_seed is not None, "the driver resolves the seed"
        self.samples[slot] = range(first_sample, first_sample + num_samples)
        self.seeds[slot] = params.seq_seed
        if not is_greedy(params):
            self._admit_drawing(slot, params)
        if _has_rules(params) or bad_word_ids:
            self.rules[slot] = self._build_rules(params, num_prompt_tokens, bad_word_ids)
        if params.logprobs is not None:
            self.num_logprobs[slot] = params.logprobs

    def release(self, slot: int) -> None:
        """Make the slot free and its columns neutral again."""
        del self.samples[slot]
        self.rules.pop(slot, None)
        self.num_logprobs.pop(slot, None)
        self.truncating.discard(slot)
        self.drawing.discard(slot)
        self.seeds[slot] = 0
        self.temperatures[slot] = 1.0
        self.greedy[slot] = True
        self.top_k[slot] = self.vocab_size
        self.top_p[slot] = 1.0
        self.log_min_p[slot] = -math.inf

    def _admit_drawing(self, slot: int, params: SamplingParams) -> None:
        self.drawing.add(slot)
        self.greedy[slot] = False
        self.temperatures[slot] = params.temperature
        top_k = params.top_k if params.top_k > 0 else self.vocab_size
        if top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
            self.truncating.add(slot)
            self.top_k[slot] = top_k
            self.top_p[slot] = params.top_p
            self.log_min_p[slot] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf

    def _build_rules(
        self, params: SamplingParams, num_prompt_tokens: int, bad_words: tuple[tuple[int, ...], ...]
    ) -> ScoreRules:
        banned = None
        if params.allowed_token_ids is not None:
            banned = torch.ones(self.vocab_size, dtype=torch.bool, device=self.device)
            banned[self._ids(params.allowed_token_ids)] = False
        bias = params.logit_bias or {}
        return ScoreRules(
            num_prompt_tokens=num_prompt_tokens,
            banned=banned,
            bias_ids=self._ids(tuple(bias)),
            bias_values=torch.tensor(list(bias.values()), dtype=torch.float32, device=self.device),
            min_tokens=params.min_tokens,
            stop_ids=self._ids(stop_ids(params, self.eos_token_id)),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bad_words=bad_words,
        )

    def _ids(self, token_ids: tuple[int, ...]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.device)


def _has_rules(params: SamplingParams) -> bool:
    return (
        params.allowed_token_ids is not None
        or bool(params.logit_bias)
        or params.min_tokens > 0
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
