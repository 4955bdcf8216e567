"""Bounded replay: of a prompt, only the last tokens run through the decoder's layers.

The layers behind the last KV source own nothing that later positions read but their window keys. So a prompt's row
that lies before its replay start leaves its keys at that source and goes no further. The start follows from the number
of prompt tokens alone, which is known when the first row runs: neither chunks nor other sequences can move it, no
stream has to be kept from one chunk to the next, and a sequence that is run again with its output starts where it
started before. What a window of the layers behind would see before the start is left out, which is the approximation
that the released model was trained with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.caches import MAX_UNDONE_TOKENS
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.step_rows import StepRows
from deepinfer.models.model_spec import ForwardInputs, Prompts


@dataclass(slots=True, frozen=True)
class Cut:
    """The first decoder layer writes keys of all T rows; `kept` [K], ascending, are the ones that go on from there.

    `queries`: index lists of the kept rows in that layer, where windows are whole; `behind`: in the layers behind it.
    `logit_rows` [L]: the wanted rows among the kept ones.
    """

    kept: Tensor
    queries: StepRows
    behind: StepRows
    logit_rows: Tensor


def replay_starts(prompts: Prompts, *, keep_tokens: int) -> list[int]:
    """Return the first position of each prompt that runs through every layer.

    0 where the logits of prompt rows are wanted: those need the whole depth.
    """
    return [
        0 if whole else max(0, num_tokens - keep_tokens)
        for num_tokens, whole in zip(prompts.num_tokens, prompts.wants_logits, strict=True)
    ]


def kept_numbers(prompts: Prompts, starts: list[int], num_rows: int) -> np.ndarray:
    """Return the numbers int64 [K] of the rows from `starts` on, ascending, and of all rows behind the prompts'."""
    kept, first_row = [], 0
    for start, first, count in zip(starts, prompts.first_positions, prompts.num_rows, strict=True):
        kept.append(np.arange(first_row + min(count, max(0, start - first)), first_row + count))
        first_row += count
    return np.concatenate((*kept, np.arange(first_row, num_rows)))


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Return `values` on `device`; nothing waits for what runs there."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def keep_rows(inputs: ForwardInputs, kept: Tensor) -> ForwardInputs:
    """Return the step as if it had the rows `kept` [K] only, in ascending order."""
    return dataclasses.replace(
        inputs,
        token_ids=inputs.token_ids[kept],
        positions=inputs.positions[kept],
        row_sequence=inputs.row_sequence[kept],
        sequence_starts=torch.searchsorted(kept, inputs.sequence_starts),
        logit_rows=None if inputs.logit_rows is None else torch.searchsorted(kept, inputs.logit_rows),
        is_padding=inputs.is_padding[kept],
    )


def cut_rows(rows: StepRows, behind: StepRows, kept: Tensor, logit_rows: Tensor) -> Cut:
    """Return the cut from the index lists of all rows and of the kept ones."""
    queries = dataclasses.replace(behind, window_rows=rows.window_rows[kept])
    return Cut(kept=kept, queries=queries, behind=behind, logit_rows=logit_rows)


def prompt_keep_tokens(config: ModelConfig, wanted: int | None, *, max_draft_tokens: int) -> int:
    """Return how many tokens of a prompt run through every layer; `wanted` None: window + 12.

    Two steps may be in flight, each with one token and its drafts, and all of them may be undone: the windows behind
    must still be whole then. Raises ConfigError below that.
    """
    smallest = config.sliding_window + 2 * (1 + max_draft_tokens)
    if wanted is not None and wanted < smallest:
        raise ConfigError(
            f"{wanted} tokens are too few: the window of {config.sliding_window} and two steps of "
            f"1 + {max_draft_tokens} tokens need {smallest}; raise it or leave it out",
            path="model.prefill_keep_tokens",
        )
    return wanted if wanted is not None else config.sliding_window + MAX_UNDONE_TOKENS
