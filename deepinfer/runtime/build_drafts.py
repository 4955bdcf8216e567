"""Puts the drafting part of a rank together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from deepinfer.config import SpeculativeConfig
from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.distributed.torch_dispatcher import TorchDispatcher
from deepinfer.errors import ConfigError
from deepinfer.log import get_logger
from deepinfer.models.model_spec import DraftNetwork, DraftUse, ModelSpec
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.speculation import Speculation
from deepinfer.sampling.noise import DRAFT_PURPOSE, TOKEN_PURPOSE
from deepinfer.speculative.drafter import ChainDrafter, Drafter
from deepinfer.speculative.verifier import RejectionVerifier, SharedNoiseVerifier

MakeDrafter = Callable[[SlotTable], Drafter]
_BYTES = 4  # of a float32
_LOGGER = get_logger("drafts")


def num_draft_tokens(config: SpeculativeConfig, spec: ModelSpec, *, num_ranks: int) -> int:
    """Return how many drafts a step makes for each sequence; 0 when drafting is off or the checkpoint can't draft.

    Raises ConfigError when the checkpoint's block is shorter, or when it has fewer draft experts than there are ranks.
    """
    path, wanted = "speculative.max_draft_tokens", config.max_draft_tokens
    if wanted == 0:
        return 0
    if spec.draft_block_size == 0:
        _LOGGER.info("the checkpoint has no draft stages: nothing is drafted")
        return 0
    if wanted > spec.draft_block_size:
        raise ConfigError(f"{wanted} is above the {spec.draft_block_size} of the checkpoint's draft block", path=path)
    if spec.num_draft_experts < num_ranks:
        message = f"{spec.num_draft_experts} draft experts can't be spread over {num_ranks} ranks; set it to 0"
        raise ConfigError(message, path=path)
    return wanted


def draft_use(role: Literal["prefill", "decode"], num_drafts: int) -> DraftUse:
    """Return what a rank of `role` loads: prefill ranks fill the rings that decode ranks draft from."""
    if num_drafts == 0:
        return "off"
    return "draft" if role == "decode" else "keep"


def draft_bytes_per_slot(config: SpeculativeConfig, num_drafts: int, vocab_size: int) -> int:
    """Return what drafts take in the slot table."""
    return num_drafts * _BYTES * (2 + (vocab_size if config.verifier == "rejection" else 0))


def build_speculation(
    config: SpeculativeConfig,
    network: DraftNetwork | None,
    table: SlotTable,
    *,
    caches: Any,
    groups: ProcessGroups | None,
    make_drafter: MakeDrafter | None,
) -> Speculation:
    """Return what verifies and drafts on `table`; `make_drafter` replaces the model's drafter."""
    is_rejection = config.verifier == "rejection"
    verifier = RejectionVerifier() if is_rejection else SharedNoiseVerifier()
    drafter: Drafter | None = None
    if make_drafter is not None and table.max_drafts > 0:
        drafter = make_drafter(table)
    elif network is not None:
        dispatcher: TokenDispatcher = LocalDispatcher(network.num_experts)
        if groups is not None:
            dispatcher = TorchDispatcher(groups.dispatch, network.num_experts)
        drafter = ChainDrafter(
            network,
            max_drafts=table.max_drafts,
            caches=caches,
            dispatcher=dispatcher,
            state=table.sampling,
            purpose=DRAFT_PURPOSE if is_rejection else TOKEN_PURPOSE,
            keeps_scores=is_rejection,
        )
    return Speculation(table, drafter=drafter, verifier=verifier)
