"""One batch for the sampler: rows, the slots they belong to, and the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.token_rows import admit, rows_of
from torch import Tensor

from deepinfer.protocol import LogprobColumns, SamplingParams
from deepinfer.sampling.sampler import Sampled, sample
from deepinfer.sampling.state import SamplingState
from deepinfer.scheduler.sampling_params import derived_seed

EOS = 1
MAX_LEN = 32


def columns_of(sampled: Sampled) -> list[LogprobColumns | None]:
    """The log-probabilities of each row, None where nobody asked."""
    places = range(len(sampled.token_ids))
    return [sampled.logprobs.columns(place, 1) if sampled.logprobs else None for place in places]


class Batch:
    """Slots with parameters, and a token table to draw from."""

    def __init__(self, *, num_slots: int = 8, vocab_size: int = 10) -> None:
        self.state = SamplingState(num_slots, vocab_size, torch.device("cpu"), eos_token_id=EOS)
        self.token_table = torch.zeros(num_slots, MAX_LEN, dtype=torch.int32)
        self.seeds: dict[int, int] = {}

    def admit(
        self,
        slot: int,
        *,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        bad_words: tuple[tuple[int, ...], ...] = (),
        **fields: object,
    ) -> None:
        params = SamplingParams(**({"seq_seed": 7, "max_tokens": 100} | fields))  # type: ignore[arg-type]
        tokens = [*prompt, *output]
        self.token_table[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        admit(self.state, slot, params, num_prompt_tokens=len(prompt), bad_word_ids=bad_words)
        self.seeds[slot] = params.seq_seed

    def sample(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], samples: Sequence[int] | None = None
    ) -> Sampled:
        numbers = samples if samples is not None else [0] * len(slots)
        seeds = [derived_seed(self.seeds.get(slot, 0), number) for slot, number in zip(slots, numbers, strict=True)]
        return sample(logits, rows_of(slots, seeds, positions, self.token_table), self.state)

    def one(self, logits: Sequence[float] | Tensor, *, slot: int, position: int) -> int:
        row = torch.as_tensor(logits, dtype=torch.float32)[None]
        return int(self.sample(row, [slot], [position]).token_ids[0])
