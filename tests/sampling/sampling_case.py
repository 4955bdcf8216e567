"""One batch for the sampler: rows, the slots they belong to, and the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.protocol import SamplingParams
from deepinfer.sampling.sampler import Sampled, sample
from deepinfer.sampling.state import SamplingState

EOS = 1
MAX_LEN = 32


class Batch:
    """Slots with parameters, and a token table to draw from."""

    def __init__(self, *, num_slots: int = 8, vocab_size: int = 10) -> None:
        self.state = SamplingState(num_slots, vocab_size, torch.device("cpu"), eos_token_id=EOS)
        self.token_table = torch.zeros(num_slots, MAX_LEN, dtype=torch.int32)

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
        self.state.admit(slot, params, num_prompt_tokens=len(prompt), bad_word_ids=bad_words)

    def sample(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], samples: Sequence[int] | None = None
    ) -> Sampled:
        return sample(
            logits,
            slots=torch.tensor(slots),
            samples=torch.tensor(samples if samples is not None else [0] * len(slots)),
            positions=torch.tensor(positions),
            token_table=self.token_table,
            state=self.state,
        )

    def one(self, logits: Sequence[float] | Tensor, *, slot: int, position: int) -> int:
        row = torch.as_tensor(logits, dtype=torch.float32)[None]
        return int(self.sample(row, [slot], [position]).token_ids[0])
