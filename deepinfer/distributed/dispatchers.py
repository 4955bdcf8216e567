"""Which dispatcher serves the ranks of a group."""

from __future__ import annotations

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.distributed.torch_dispatcher import TorchDispatcher


def open_dispatcher(groups: ProcessGroups | None, num_experts: int) -> TokenDispatcher:
    """Return the dispatcher of a rank for `num_experts` logical experts; `groups` None: it is alone."""
    return LocalDispatcher(num_experts) if groups is None else TorchDispatcher(groups.dispatch, num_experts)
