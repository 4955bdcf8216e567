"""Puts the drafting part of a rank together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from deepinfer.config import SpeculativeConfig
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.token_dispatcher import TokenDispatcher
from deepinfer.errors import ConfigError
from deepinfer.kernels.registry import KernelSet
from deepinfer.log import get_logger
from deepinfer.models.model_spec import DraftNetwork, DraftUse, ModelSpec
from deepinfer.platforms.platform import Stream
from deepinfer.protocol import Role
from deepinfer.runtime.measure_costs import Room, measure_costs
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.speculation import Speculation
from deepinfer.speculative.cost_table import read_table, table_path, write_table
from deepinfer.speculative.drafter import ChainDrafter, Drafter
from deepinfer.speculative.verifier import RejectionVerifier, SharedNoiseVerifier
from deepinfer.speculative.verify_planner import VerifyPlanner

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


def draft_use(role: Role, num_drafts: int) -> DraftUse:
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
    kernels: KernelSet,
    caches: Any,
    dispatchers: Callable[[int], TokenDispatcher],
    make_drafter: MakeDrafter | None,
) -> Speculation:
    """Return what verifies and drafts on `table`; `make_drafter` replaces the model's drafter.

    `dispatchers(num_experts)` gives the draft stages' own dispatcher.
    """
    is_rejection = config.verifier == "rejection"
    verifier = (RejectionVerifier if is_rejection else SharedNoiseVerifier)(kernels.accept_rows)
    drafter: Drafter | None = None
    if make_drafter is not None and table.max_drafts > 0:
        drafter = make_drafter(table)
    elif network is not None:
        drafter = ChainDrafter(
            network,
            max_drafts=table.max_drafts,
            caches=caches,
            dispatcher=dispatchers(network.num_experts),
            state=table.sampling,
            independent=is_rejection,
            with_confidence=config.varlen,
        )
    return Speculation(table, drafter=drafter, verifier=verifier)


def build_planner(
    cache_dir: Path,
    runner: ModelRunner,
    stream: Stream,
    room: Room,
    *,
    max_drafts: int,
    groups: ProcessGroups | None,
    key: Mapping[str, object],
) -> VerifyPlanner:
    """Return what gives each step its draft budget, with the costs kept under `key` or measured now.

    A collective: if the costs are not kept on some rank's host, all ranks measure.
    """
    path = table_path(cache_dir, {**key, "max_drafts": max_drafts, "max_running": room.max_running})
    table = read_table(path)
    is_known, num_slots = table is not None, room.num_slots
    if groups is not None:
        gathered = groups.sync.all_gather(torch.tensor([int(is_known), num_slots]))
        is_known, num_slots = bool(gathered[:, 0].all()), int(gathered[:, 1].min())
    if table is None or not is_known:
        table = measure_costs(runner, stream, room, num_slots=num_slots, max_drafts=max_drafts)
        write_table(path, table)
        _LOGGER.info("measured the costs of a step and kept them in %s", path)
    return VerifyPlanner(table, max_drafts)
