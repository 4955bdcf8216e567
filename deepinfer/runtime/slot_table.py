"""What the device knows of each running sequence: the table that leads, and that the host follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from deepinfer.kernels.ops import GumbelArgmax
from deepinfer.kernels.reference.draft_rows import read_slots as reference_read_slots
from deepinfer.kernels.reference.draft_rows import write_tokens as reference_write_tokens
from deepinfer.kernels.reference.sampling import gumbel_argmax as reference_gumbel_argmax
from deepinfer.kernels.step_ops import ReadSlots, SlotRows, WriteTokens
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.protocol import SamplingParams
from deepinfer.runtime.step_upload import Column
from deepinfer.sampling.state import DrawColumns, SamplingState, draw_column_arrays
from deepinfer.scheduler.step_plan import BlockGrant, SlotAdmission, StepPlan
from deepinfer.speculative.drafter import Anchors, Drafts

BadWordIds = Callable[[SamplingParams], tuple[tuple[int, ...], ...]]

TOKEN_BYTES = 4  # of an entry of the token table


class SlotTable:
    """Per-slot state on the device; slot 0 belongs to padding rows and stays zero. Only the device thread touches it.

    `token_table` [S, max_model_len + max_drafts] int32: tokens by position. `num_tokens` [S] int64: how many of them
    are committed; the last one, the anchor, has not run yet. Behind it stand the `num_drafts` [S] int64 drafts of the
    next step, with `confidence` [S, max_drafts] float32 (log-odds, see `Drafts`; zeros unless asked for) and, where
    they are kept, `draft_scores` [S, max_drafts, V]. `limits` [S] int64: a sequence ends at this number of tokens at
    the latest. `block_tables`: per paged group [S, max_blocks] int64, unused entries 0. `sampling`: parameters by slot.
    On the host, by slot: `num_prompt_tokens`; `prompt_logprobs` of the slots that want them; `num_blocks` per group,
    which narrows block tables without asking the device; `with_grammar`, the slots whose draws wait for a mask; and
    `max_tokens`, an upper bound of `num_tokens`.
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
        read_slots: ReadSlots = reference_read_slots,
        write_tokens: WriteTokens = reference_write_tokens,
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
        self.max_tokens = [0] * num_slots
        self.prompt_logprobs: dict[int, int] = {}
        self.with_grammar: set[int] = set()
        self.num_blocks = {group.name: [0] * num_slots for group in paged}
        self._bad_word_ids = bad_word_ids
        self._read_slots, self._write_tokens = read_slots, write_tokens

    def describe(self, plan: StepPlan) -> dict[str, Column]:
        """Take note of the admissions and grants of `plan` on the host; return what `apply` needs on the device."""
        columns: dict[str, Column] = {}
        if plan.admissions:
            draws = [self._admit(admission) for admission in plan.admissions]
            columns |= {
                "admitted slots": np.array([admission.slot for admission in plan.admissions]),
                "admitted tokens": np.concatenate([admission.token_ids for admission in plan.admissions]),
                "admitted lengths": np.array([len(admission.token_ids) for admission in plan.admissions]),
                "admitted limits": np.array([self._limit(admission) for admission in plan.admissions]),
                **{f"admitted {name}": column for name, column in draw_column_arrays(draws).items()},
            }
        for group in {grant.group for grant in plan.grants}:
            columns |= self._describe_grants(group, [grant for grant in plan.grants if grant.group == group])
        return columns

    def apply(self, plan: StepPlan, sent: dict[str, torch.Tensor]) -> None:
        """Give slots to new sequences, whatever was in them before, then write block ids into block tables."""
        if plan.admissions:
            slots = sent["admitted slots"]
            tokens = sent["admitted tokens"].split([len(admission.token_ids) for admission in plan.admissions])
            for admission, token_ids in zip(plan.admissions, tokens, strict=True):
                self.token_table[admission.slot, : len(token_ids)] = token_ids
            self.num_tokens[slots] = sent["admitted lengths"]
            self.limits[slots] = sent["admitted limits"]
            self.num_drafts.index_fill_(0, slots, 0)
            for table in self.block_tables.values():
                table.index_fill_(0, slots, 0)
            self.sampling.write(slots, {name.removeprefix("admitted "): column for name, column in sent.items()})
        for name, table in self.block_tables.items():
            if f"{name} block ids" in sent:
                table[sent[f"{name} slots"], sent[f"{name} places"]] = sent[f"{name} block ids"]

    def _admit(self, admission: SlotAdmission) -> DrawColumns:
        slot, params = admission.slot, admission.sampling
        self.num_prompt_tokens[slot] = admission.num_prompt_tokens
        self.max_tokens[slot] = len(admission.token_ids)
        for counts in self.num_blocks.values():
            counts[slot] = 0
        self.with_grammar.discard(slot)
        if admission.grammar is not None:
            self.with_grammar.add(slot)
        self.prompt_logprobs.pop(slot, None)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[slot] = params.prompt_logprobs
        return self.sampling.admit(
            slot,
            params,
            num_prompt_tokens=admission.num_prompt_tokens,
            bad_word_ids=self._bad_word_ids(params) if params.bad_words else (),
            first_sample=admission.first_sample,
            num_samples=admission.num_samples,
        )

    def _limit(self, admission: SlotAdmission) -> int:
        return min(admission.num_prompt_tokens + admission.sampling.max_tokens, self.max_model_len)

    def _describe_grants(self, group: str, grants: Sequence[BlockGrant]) -> dict[str, Column]:
        """Entries behind what is granted are void from then on."""
        for grant in grants:
            self.num_blocks[group][grant.slot] = grant.first_index + len(grant.block_ids)
        return {
            f"{group} slots": np.repeat([grant.slot for grant in grants], [len(grant.block_ids) for grant in grants]),
            f"{group} places": np.concatenate(
                [np.arange(grant.first_index, grant.first_index + len(grant.block_ids)) for grant in grants]
            ),
            f"{group} block ids": np.concatenate([grant.block_ids for grant in grants]),
        }

    def note_step(self, slots: Sequence[int]) -> int:
        """Count one more step of `slots`; return the largest position that any of its rows may produce."""
        largest = 0
        for slot in slots:
            largest = max(largest, self.max_tokens[slot] + self.max_drafts)
            self.max_tokens[slot] = min(self.max_tokens[slot] + 1 + self.max_drafts, self.max_model_len)
        return largest

    def commit(self, slots: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Append the first `counts[i]` of `token_ids[i]` to `slots` [n]; they are the next steps' inputs.

        `token_ids` [n, up to 1 + max_drafts] int64, `counts` [n] int64. The drafts that stood there are used up. Slots
        with a count differ; one without is left alone.
        """
        self._write(slots, token_ids, counts)

    def read(self, slots: torch.Tensor) -> SlotRows:
        """Return what stands in `slots` [n] and what may be added to it."""
        return self._read_slots(self.token_table, self.num_tokens, self.num_drafts, self.limits, slots=slots)

    def anchors(self, slots: torch.Tensor, owners: tuple[int, ...]) -> Anchors:
        """Return what drafts for `slots` [n] begin with; slot 0 is inert. `owners`: those that the host knows of."""
        rows = self.read(slots)
        return Anchors(slots, rows.positions, rows.token_ids, token_table=self.token_table, owners=owners)

    def put_drafts(self, slots: torch.Tensor, drafts: Drafts) -> None:
        """Leave `drafts` behind the committed tokens of `slots` [n]; slot 0 stays as it is."""
        self._write(slots, drafts.token_ids, None)
        if drafts.confidence is not None:
            self.confidence[slots] = drafts.confidence
        if self.draft_scores is not None:
            assert drafts.scores is not None, "the drafter keeps no scores"
            self.draft_scores[slots] = drafts.scores

    def _write(self, slots: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor | None) -> None:
        places = self.token_table, self.num_tokens, self.num_drafts
        self._write_tokens(*places, slots=slots, token_ids=token_ids, counts=counts)

    def block_rows(self, device_slots: torch.Tensor, slots: Sequence[int] | None) -> dict[str, torch.Tensor]:
        """Return, per paged group, [B, width] int64: the block tables of `device_slots` [B].

        They are as wide as the longest of `slots`, the same on the host; None: as any may be.
        """
        return {
            name: table[device_slots, : None if slots is None else self._width(name, slots)]
            for name, table in self.block_tables.items()
        }

    def _width(self, group: str, slots: Sequence[int]) -> int:
        return max([1, *(self.num_blocks[group][slot] for slot in slots)])
