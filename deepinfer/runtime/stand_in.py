"""What a benchmark puts in the place of a rank's checkpoint and of the other ranks of its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.models.model_spec import ModelSpec
from deepinfer.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class StandIn:
    """A model of `spec` that needs no files, and `dispatchers(num_experts)`, which need no other ranks."""

    spec: ModelSpec
    tokenizer: Tokenizer
    dispatchers: Callable[[int], TokenDispatcher]
