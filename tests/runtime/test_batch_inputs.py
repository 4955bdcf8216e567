"""Step inputs from a plan and the slot table: order, positions of the device, padding."""

from __future__ import annotations

import numpy as np
import torch
from support.fake_model import FakeCaches, FakeModel, fake_groups
from support.static_shapes import static_shapes

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.kernels.registry import select_kernels
from deepinfer.protocol import SamplingParams
from deepinfer.runtime.batch_inputs import (
    DecodeRows,
    StepInputs,
    Surroundings,
    build_decode_inputs,
    build_inputs,
    chunk_columns,
    chunk_logits,
    draw_rows,
)
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.step_upload import send_together
from deepinfer.sampling.rows import TokenRows
from deepinfer.scheduler.sampling_params import derived_seed
from deepinfer.scheduler.step_plan import BlockGrant, PrefillChunk, SlotAdmission, StepPlan
from deepinfer.speculative.drafter import Drafts

KERNELS = select_kernels("cpu", numerics="reference", batch_invariant=False, overrides={})


def _table(*, max_drafts: int = 0) -> SlotTable:
    table = SlotTable(
        num_slots=5,
        max_model_len=32,
        vocab_size=64,
        eos_token_id=0,
        groups=fake_groups(4),
        device=torch.device("cpu"),
        bad_word_ids=lambda params: (),
        max_drafts=max_drafts,
    )
    admissions = [
        SlotAdmission(slot, np.array(tokens, np.int32), len(tokens), params, first_sample=slot, num_samples=params.n)
        for slot, tokens, params in (
            (1, [11, 12, 13, 14, 15, 16], SamplingParams(seq_seed=1, prompt_logprobs=2, n=3)),
            (2, [21, 22, 23], SamplingParams(seq_seed=2)),
            (4, [41, 42], SamplingParams(seq_seed=4)),
        )
    ]
    grants = [
        BlockGrant(slot, "global", 0, np.array(blocks, np.int32)) for slot, blocks in ((1, [7, 8]), (2, [3]), (4, [5]))
    ]
    _apply(StepPlan(0, admissions=tuple(admissions), grants=tuple(grants)), table)
    return table


def _apply(plan: StepPlan, table: SlotTable) -> None:
    table.apply(plan, send_together(table.describe(plan), table.device))


def _build(
    plan: StepPlan, table: SlotTable, *, caches: FakeCaches | None = None
) -> tuple[StepInputs, TokenRows | None]:
    """The inputs of a step, and its draws; decode slots run their anchor only."""
    chunks = chunk_logits(plan, table)
    columns = chunk_columns(plan, chunks, table) | {"decode slots": plan.decode_slots}
    sent = send_together(columns, table.device)
    slots = sent["decode slots"]
    decode = DecodeRows(slots, torch.zeros_like(slots), len(slots)) if len(slots) else None
    step = build_inputs(plan, Surroundings(table, caches, KERNELS, LocalDispatcher(8)), sent, decode)
    return step, draw_rows(chunks, sent, table) if chunks.draws else None


def test_decode_rows_stand_behind_chunks() -> None:
    plan = StepPlan(
        0,
        chunks=(PrefillChunk(1, 3, 3, samples=True),),
        decode_slots=np.array([4, 2], np.int32),
    )
    table = _table()
    step, draws = _build(plan, table)
    forward = step.forward
    assert forward.token_ids.tolist() == [14, 15, 16, 42, 23]
    assert forward.positions.tolist() == [3, 4, 5, 1, 2]
    assert forward.row_sequence.tolist() == [0, 0, 0, 1, 2]
    assert forward.sequence_slots.tolist() == [1, 4, 2, 0]
    assert forward.sequence_starts.tolist() == [0, 3, 4, 5, 5]
    assert forward.is_padding.tolist() == [False] * 5
    assert forward.block_tables["global"].tolist() == [[7, 8], [5, 0], [3, 0], [0, 0]]
    # Logits: the two prompt rows that predict a prompt token, then the sampling row, then decode rows.
    assert forward.logit_rows is not None
    assert forward.logit_rows.tolist() == [0, 1, 2, 3, 4]
    (prompt,) = chunk_logits(plan, table).prompts
    assert (prompt.slot, prompt.first_logit, prompt.num_rows, prompt.first_position) == (1, 0, 2, 4)
    assert [place for place, _ in chunk_logits(plan, table).draws] == [2, 2, 2]
    assert draws is not None
    assert draws.slots.tolist() == [1, 1, 1]
    assert draws.seeds.tolist() == [derived_seed(1, sample) for sample in (1, 2, 3)]
    assert draws.positions.tolist() == [6, 6, 6]
    assert draws.owners == (1, 1, 1)
    assert step.verify is not None
    assert step.verify.rows.slots.tolist() == [4, 2]
    assert step.verify.rows.seeds.tolist() == [derived_seed(4, 4), derived_seed(2, 2)]
    assert step.verify.rows.positions.tolist() == [2, 3]
    assert (step.decode_slots.tolist(), step.first_verify_logit) == ([4, 2], 3)


def test_positions_follow_what_the_device_has_committed() -> None:
    table = _table()
    table.commit(torch.tensor([4, 2]), torch.tensor([[51], [52]]), torch.tensor([1, 1]))
    forward = _build(StepPlan(0, decode_slots=np.array([2, 4], np.int32)), table)[0].forward
    assert forward.logit_rows is None, "all of them"
    assert forward.token_ids.tolist() == [52, 51]
    assert forward.positions.tolist() == [3, 2]


def test_a_plan_without_rows_is_one_padding_row() -> None:
    step, draws = _build(StepPlan(0), _table())
    assert step.forward.is_padding.tolist() == [True]
    assert step.forward.sequence_slots.tolist() == [0]
    assert (len(step.forward.logit_rows), draws, step.verify) == (0, None, None)


def test_a_padding_row_is_inert() -> None:
    """It gives no logits and leaves the caches as they were, outside of the padding block and slot."""
    table, model = _table(), FakeModel()
    caches = model.allocate_caches(num_blocks={"global": 9}, num_slots=5, tokens_per_block=4)
    found = []
    for plan in (StepPlan(0, chunks=(PrefillChunk(1, 0, 6, samples=True),)), StepPlan(1)):
        step, _ = _build(plan, table, caches=caches)
        found.append((len(model.forward(step.forward).logits), caches.records[1:].clone(), caches.rings[1:].clone()))
    (num_logits, *before), (num_padding_logits, *after) = found
    assert (num_logits, num_padding_logits) == (1 + 5, 0)
    assert all(torch.equal(plain, padded) for plain, padded in zip(before, after, strict=True))
    assert any(part.any() for part in before)


def test_a_slot_forgets_its_last_sequence() -> None:
    table = _table()
    admission = SlotAdmission(1, np.array([9], np.int32), 1, SamplingParams(seq_seed=5))
    _apply(StepPlan(1, admissions=(admission,)), table)
    forward = _build(StepPlan(0, chunks=(PrefillChunk(1, 0, 1, samples=True),)), table)[0].forward
    assert forward.block_tables["global"].tolist() == [[0], [0]]
    assert table.prompt_logprobs == {}
    assert table.sampling.draw_seeds[1] == (5,)


def _decode(table: SlotTable, slots: list[int], num_drafts: list[int], num_rows: int) -> StepInputs:
    rows = DecodeRows(torch.tensor(slots), torch.tensor(num_drafts), num_rows)
    return build_decode_inputs(Surroundings(table, None, KERNELS, LocalDispatcher(8)), rows)


def test_rows_and_sequences_that_turn_out_not_to_exist_are_padding() -> None:
    """Slot 2 has ended, slot 4 runs two drafts, slot 1 none, and the last place is nobody's."""
    table = _table(max_drafts=3)
    step = _decode(table, [2, 4, 1, 0], [-1, 2, 0, -1], 9)
    forward = step.forward
    assert forward.row_sequence.tolist() == [1, 1, 1, 2, 4, 4, 4, 4, 4]
    assert forward.sequence_starts.tolist() == [0, 0, 3, 4, 4, 9]
    assert forward.positions.tolist() == [1, 2, 3, 5, 0, 0, 0, 0, 0]
    assert forward.token_ids.tolist() == [42, 0, 0, 16, 0, 0, 0, 0, 0]
    assert forward.is_padding.tolist() == [False] * 4 + [True] * 5
    assert step.verify is not None
    assert step.verify.drafts.tolist() == [0, 0] + [-1] * 7
    assert step.verify.rows.by_owner[1:3].tolist() == [[0, 1, 2, 2], [3, 3, 3, 3]]
    assert int(step.verify.rows.by_owner.max()) < 9


def test_what_is_not_there_commits_nothing() -> None:
    table = _table(max_drafts=3)
    before = [part.clone() for part in (table.token_table, table.num_tokens)]
    slots = torch.tensor([2, 0, 1])
    table.commit(slots, torch.full((3, 4), 9), torch.tensor([0, 0, 2]))
    after = [table.token_table, table.num_tokens]
    for slot in (0, 2, 3, 4):
        assert all(torch.equal(old[slot], new[slot]) for old, new in zip(before, after, strict=True))
    assert int(table.num_tokens[1]) == 6 + 2
    drafts = Drafts(torch.full((3, 3), 7), torch.ones(3, 3))
    table.put_drafts(slots, drafts)
    assert not table.token_table[0].any()
    assert int(table.num_drafts[0]) == 0
    assert table.token_table[1, 6:11].tolist() == [9, 9, 7, 7, 7]


def test_no_layout_reads_the_device_back() -> None:
    table = _table(max_drafts=3)
    rows = DecodeRows(torch.tensor([2, 4, 1, 0]), torch.tensor([-1, 2, 0, -1]), 9)
    around = Surroundings(table, None, KERNELS, LocalDispatcher(8))
    with static_shapes():
        build_decode_inputs(around, rows)
