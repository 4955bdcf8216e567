"""A golden variant run case by case, its logits beside the recorded ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from support.golden_case import case_names, read_tensors, relative_error
from support.step_runner import StepRunner
from torch import Tensor

from deepinfer.models.deepseek_v41.model import DeepseekV41


@dataclass(frozen=True)
class Outcome:
    """Rows of one case: ours and theirs, prompt first, then the fed tokens."""

    name: str
    ours: Tensor
    theirs: Tensor
    tensors: dict[str, Tensor]

    @property
    def error(self) -> Tensor:
        return relative_error(self.ours, self.theirs)

    def num_rows_before_a_tie(self, mode: str) -> int:
        """Rows before the first whose selection cuts between equal scores, which no rule of the reference decides."""
        ties = (self.tensors[f"{mode}.index_gap"] == 0).nonzero()
        count = int(ties.min()) if len(ties) else len(self.error)
        assert count > 0
        return count


class OnFed(Protocol):
    """Is told when the fed tokens of a case begin, and when the next prompt does."""

    def __call__(self, *, begins: bool) -> None: ...


def replay_cases(variant: Path, model: DeepseekV41, wanted_mode: str, *, on_fed: OnFed | None = None) -> list[Outcome]:
    """Run each case's prompt, then its fed tokens in a second step: their rows are those of single steps."""
    outcomes = []
    tell = on_fed or _nobody
    for name in case_names(variant, wanted_mode):
        tensors = read_tensors(variant / "cases.safetensors", f"{name}.")
        prompt, fed = tensors["prompt_ids"], tensors["decode_input_ids"]
        runner = StepRunner(model, num_slots=1)
        tell(begins=False)
        first = runner.run_in_chunks(1, prompt, [len(prompt)])
        tell(begins=True)
        second = runner.run_in_chunks(1, fed, [len(fed)], start=len(prompt))
        theirs = torch.cat([tensors[f"{wanted_mode}.{part}_logits"].float() for part in ("prefill", "decode")])
        outcomes.append(Outcome(name, torch.cat((first, second)).cpu(), theirs, tensors))
    return outcomes


def _nobody(*, begins: bool) -> None:
    """Hear nothing."""
