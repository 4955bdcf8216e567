"""What the device knows of each running sequence: the table that leads, and that the host follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from deepinfer.kernels.ops import GumbelArgmax
from deepinfer.kernels.reference.sampling import gumbel_argmax as reference_gumbel_argmax
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.protocol import SamplingParams
from deepinfer.sampling.state import SamplingState
from deepinfer.scheduler.step_plan import BlockGrant, SlotAdmission
from deepinfer.speculative.drafter import Anchors, Drafts

BadWordIds = Callable[[SamplingParams], tuple[tuple[int, ...], ...]]

TOKEN_BYTES = 4  # of an entry of the token table


class SlotTable:
    """Per-slot state on the device; slot 0 belongs to padding rows and stays zero. Only the device thread touches it.

    `token_table` [S, max_model_len + max_drafts] int32: tokens by position. `num_tokens` [S] int64: how many of them
    are committed; the last one, the anchor, has not run yet. Behind it stand the `num_drafts` [S] int64 drafts of the
    next step, with `confidence` [S, max_drafts] float32 (log-odds, see `Drafts`) and, where they are kept,
    `draft_scores` [S, max_drafts, V]. `limits` [S] int64: a sequence ends at this number of tokens at the latest.
    `block_tables`: per paged group [S, max_blocks] int64, unused entries 0. `sampling`: parameters by slot.
    On the host, by slot: `num_prompt_tokens`; `prompt_logprobs` of the slots that want them; `unusable`, the slots
    whose prompt gave unusable numbers; `num_blocks` per group, which narrows block tables without asking the device.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_id: int,
        groups: tuple[KVGroup, ...],
        device: torch.device,
        bad_word_ids: BadWordIds,
        gumbel_argmax: GumbelArgmax = reference_gumbel_argmax,
        max_drafts: int = 0,
        keeps_draft_scores: bool = False,
    ) -> None:
        """Allocate for `num_slots` slots, the padding slot included. `bad_word_ids` spells a request's bad words."""
        paged = [group for group in groups if group.kind == "paged"]
        self.device = device
        self.max_model_len = max_model_len
        self.max_drafts = max_drafts
        self.token_table = torch.zeros(num_slots, max_model_len + max_drafts, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.num_drafts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.limits = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.confidence = torch.zeros(num_slots, max_drafts, device=device)
        self.draft_scores: torch.Tensor | None = None
        if keeps_draft_scores:
            self.draft_scores = torch.zeros(num_slots, max_drafts, vocab_size, device=device)
        self.block_tables = {
            group.name: torch.zeros(num_slots, group.num_blocks_for(max_model_len), dtype=torch.int64, device=device)
            for group in paged
        }
        self.sampling = SamplingState(
            num_slots, vocab_size, device, eos_token_id=eos_token_id, gumbel_argmax=gumbel_argmax
        )
        self.num_prompt_tokens = [0] * num_slots
        self.prompt_logprobs: dict[int, int] = {}
        self.unusable: set[int] = set()
        self.num_blocks = {group.name: [0] * num_slots for group in paged}
        self._bad_word_ids = bad_word_ids

    def admit(self, admission: SlotAdmission) -> None:
        """Give the slot to a new sequence, whatever was in it before."""
        slot, num_tokens = admission.slot, len(admission.token_ids)
        self.token_table[slot, :num_tokens] = torch.from_numpy(np.array(admission.token_ids, np.int32))
        self.num_tokens[slot] = num_tokens
        self.num_drafts[slot] = 0
        self.limits[slot] = min(admission.num_prompt_tokens + admission.sampling.max_tokens, self.max_model_len)
        self.num_prompt_tokens[slot] = admission.num_prompt_tokens
        for name, table in self.block_tables.items():
            table[slot] = 0
            self.num_blocks[name][slot] = 0
        if slot in self.sampling.samples:
            self.sampling.release(slot)
        params = admission.sampling
        self.sampling.admit(
            slot,
            params,
            num_prompt_tokens=admission.num_prompt_tokens,
            bad_word_ids=self._bad_word_ids(params) if params.bad_words else (),
            first_sample=admission.first_sample,
            num_samples=admission.num_samples,
        )
        self.unusable.discard(slot)
        self.prompt_logprobs.pop(slot, None)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[slot] = params.prompt_logprobs

    def grant(self, grant: BlockGrant) -> None:
        """Write block ids into the slot's block table; entries behind them are void from then on."""
        end = grant.first_index + len(grant.block_ids)
        block_ids = torch.from_numpy(grant.block_ids.astype(np.int64))
        self.block_tables[grant.group][grant.slot, grant.first_index : end] = block_ids
        self.num_blocks[grant.group][grant.slot] = end

    def commit(self, slots: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Append the first `counts[i]` of `token_ids[i]` to distinct `slots` [n]; they are the next steps' inputs.

        `token_ids` [n, up to 1 + max_drafts] int64, `counts` [n] int64. The drafts that stood there are used up.
        """
        columns = self.num_tokens[slots, None] + torch.arange(token_ids.shape[1], device=self.device)
        self.token_table[slots[:, None], columns] = token_ids.to(torch.int32)
        self.num_tokens[slots] += counts
        self.num_drafts[slots] = 0

    def room_for_drafts(self, slots: torch.Tensor) -> torch.Tensor:
        """Return [n] int64: how many drafts a step can use, at most those that are there; -1: the sequence has ended.

        A step commits one token more than it accepts drafts, and none beyond the limit.
        """
        return torch.minimum(self.num_drafts[slots], self.limits[slots] - self.num_tokens[slots] - 1)

    def sample_numbers(self, slots: Sequence[int]) -> torch.Tensor:
        """Return int64 [n]: the sample that each of `slots` is, where a slot is one."""
        samples = [self.sampling.samples[slot][0] if slot else 0 for slot in slots]
        return torch.tensor(samples, dtype=torch.int64, device=self.device)

    def anchors(self, slots: Sequence[int], device_slots: torch.Tensor) -> Anchors:
        """Return what drafts for `slots` begin with; slot 0 is inert."""
        return Anchors(
            slots=device_slots,
            samples=self.sample_numbers(slots),
            positions=(self.num_tokens[device_slots] - 1).clamp_min(0),
            token_table=self.token_table,
        )

    def put_drafts(self, slots: torch.Tensor, drafts: Drafts) -> None:
        """Leave `drafts` behind the committed tokens of `slots` [n]."""
        columns = self.num_tokens[slots, None] + torch.arange(self.max_drafts, device=self.device)
        self.token_table[slots[:, None], columns] = drafts.token_ids.to(torch.int32)
        self.num_drafts[slots] = self.max_drafts
        self.confidence[slots] = drafts.confidence
        if self.draft_scores is not None:
            assert drafts.scores is not None, "the drafter keeps no scores"
            self.draft_scores[slots] = drafts.scores

    def block_rows(self, slots: list[int], device_slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return, per paged group, [B, width] int64: the block tables of `slots`, as wide as the longest of them."""
        return {
            name: table[device_slots, : max([1, *(self.num_blocks[name][slot] for slot in slots)])]
            for name, table in self.block_tables.items()
        }
