"""Step inputs from a plan and the slot table: order, positions of the device, padding."""

from __future__ import annotations

import numpy as np
import torch
from support.fake_model import FakeModel, fake_groups

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.protocol import SamplingParams
from deepinfer.runtime.batch_inputs import StepInputs, build_inputs
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.scheduler.step_plan import BlockGrant, PrefillChunk, SlotAdmission, StepPlan


def _table() -> SlotTable:
    table = SlotTable(
        num_slots=5,
        max_model_len=32,
        vocab_size=64,
        eos_token_id=0,
        groups=fake_groups(4),
        device=torch.device("cpu"),
        bad_word_ids=lambda params: (),
    )
    for slot, tokens, params, num_samples in (
        (1, [11, 12, 13, 14, 15, 16], SamplingParams(seq_seed=1, prompt_logprobs=2, n=3), 3),
        (2, [21, 22, 23], SamplingParams(seq_seed=2), 1),
        (4, [41, 42], SamplingParams(seq_seed=4), 1),
    ):
        ids = np.array(tokens, np.int32)
        table.admit(SlotAdmission(slot, ids, len(ids), params, first_sample=slot, num_samples=num_samples))
    table.grant(BlockGrant(1, "global", 0, np.array([7, 8], np.int32)))
    table.grant(BlockGrant(2, "global", 0, np.array([3], np.int32)))
    table.grant(BlockGrant(4, "global", 0, np.array([5], np.int32)))
    return table


def _build(plan: StepPlan, table: SlotTable) -> StepInputs:
    drafts = torch.zeros(len(plan.decode_slots), dtype=torch.int64)
    return build_inputs(plan, table, num_drafts=drafts, caches=None, kernels=None, dispatcher=LocalDispatcher(8))


def test_decode_rows_stand_behind_chunks() -> None:
    plan = StepPlan(
        0,
        chunks=(PrefillChunk(1, 3, 3, samples=True),),
        decode_slots=np.array([4, 2], np.int32),
    )
    step = _build(plan, _table())
    forward = step.forward
    assert forward.token_ids.tolist() == [14, 15, 16, 42, 23]
    assert forward.positions.tolist() == [3, 4, 5, 1, 2]
    assert forward.row_sequence.tolist() == [0, 0, 0, 1, 2]
    assert forward.sequence_slots.tolist() == [1, 4, 2]
    assert forward.sequence_starts.tolist() == [0, 3, 4, 5]
    assert forward.is_padding.tolist() == [False] * 5
    assert forward.block_tables["global"].tolist() == [[7, 8], [5, 0], [3, 0]]
    # Logits: the two prompt rows that predict a prompt token, then the sampling row, then decode rows.
    assert forward.logit_rows.tolist() == [0, 1, 2, 3, 4]
    (prompt,) = step.prompts
    assert (prompt.slot, prompt.first_logit, prompt.num_rows, prompt.first_position) == (1, 0, 2, 4)
    assert step.samples.logits.tolist() == [2, 2, 2]
    assert step.samples.slots.tolist() == [1, 1, 1]
    assert step.samples.samples.tolist() == [1, 2, 3]
    assert step.samples.positions.tolist() == [6, 6, 6]
    assert step.samples.owners == ((1, 3),)
    assert step.verify is not None
    assert step.verify.slots.tolist() == [4, 2]
    assert step.verify.samples.tolist() == [4, 2]
    assert step.verify.positions.tolist() == [2, 3]
    assert (step.decode_slots, step.first_verify_logit) == ((4, 2), 3)


def test_positions_follow_what_the_device_has_committed() -> None:
    table = _table()
    table.commit(torch.tensor([4, 2]), torch.tensor([[51], [52]]), torch.tensor([1, 1]))
    forward = _build(StepPlan(0, decode_slots=np.array([2, 4], np.int32)), table).forward
    assert forward.token_ids.tolist() == [52, 51]
    assert forward.positions.tolist() == [3, 2]


def test_a_plan_without_rows_is_one_padding_row() -> None:
    step = _build(StepPlan(0), _table())
    assert step.forward.is_padding.tolist() == [True]
    assert step.forward.sequence_slots.tolist() == [0]
    assert (len(step.forward.logit_rows), step.samples.owners, step.prompts) == (0, (), ())


def test_a_padding_row_is_inert() -> None:
    """It gives no logits and leaves the caches as they were, outside of the padding block and slot."""
    table, model = _table(), FakeModel()
    caches = model.allocate_caches(num_blocks={"global": 9}, num_slots=5, tokens_per_block=4)
    found = []
    for plan in (StepPlan(0, chunks=(PrefillChunk(1, 0, 6, samples=True),)), StepPlan(1)):
        none = torch.zeros(0, dtype=torch.int64)
        step = build_inputs(plan, table, num_drafts=none, caches=caches, kernels=None, dispatcher=LocalDispatcher(8))
        found.append((len(model.forward(step.forward).logits), caches.records[1:].clone(), caches.rings[1:].clone()))
    (num_logits, *before), (num_padding_logits, *after) = found
    assert (num_logits, num_padding_logits) == (1 + 5, 0)
    assert all(torch.equal(plain, padded) for plain, padded in zip(before, after, strict=True))
    assert any(part.any() for part in before)


def test_a_slot_forgets_its_last_sequence() -> None:
    table = _table()
    table.admit(SlotAdmission(1, np.array([9], np.int32), 1, SamplingParams(seq_seed=5)))
    forward = _build(StepPlan(0, chunks=(PrefillChunk(1, 0, 1, samples=True),)), table).forward
    assert forward.block_tables["global"].tolist() == [[0]]
    assert table.prompt_logprobs == {}
    assert table.sampling.samples[1] == range(1)
