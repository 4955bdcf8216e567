"""A step's shapes don't depend on device data and nothing in it waits for the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from support.golden_case import load_model, mode_kernels
from support.static_shapes import NotStaticError, allow_ops, static_shapes
from support.step_runner import Chunk, StepRunner

from deepinfer.models.model_spec import Prompts

W16 = Path(__file__).parents[1] / "golden" / "w16"
KEEP = 28


@pytest.fixture(scope="module")
def runner() -> StepRunner:
    return StepRunner(load_model(W16, allow_ops(mode_kernels("ref"))), max_tokens=128)


def test_a_ragged_step_with_padding_is_static(runner: StepRunner) -> None:
    tokens = torch.arange(3, 60)
    runner.run(Chunk(1, 0, tokens[:33]), Chunk(2, 0, tokens[:20]))
    chunks = (Chunk(1, 33, tokens[33:37]), Chunk(2, 20, tokens[20:21]), Chunk(3, 0, tokens[:2]))
    inputs = runner.inputs(chunks, num_padding=3)
    with torch.inference_mode(), static_shapes():
        runner.model.forward(inputs)


def test_a_prompt_that_is_cut_short_is_static(runner: StepRunner) -> None:
    inputs = runner.inputs((Chunk(1, 0, torch.arange(3, 43)), Chunk(2, 0, torch.arange(3, 12))), num_padding=2)
    prompts = Prompts(num_tokens=(40, 9), first_positions=(0, 0), num_rows=(40, 9), wants_logits=(False, False))
    inputs = dataclasses.replace(inputs, prompts=prompts, logit_rows=torch.tensor([39, 48]))
    runner.model.keep_tokens = KEEP
    try:
        with torch.inference_mode(), static_shapes():
            assert runner.model.forward(inputs).logits.shape == (2, 512)
    finally:
        runner.model.keep_tokens = None


def test_padding_rows_may_be_counted_to_the_last_sequence(runner: StepRunner) -> None:
    """As when a step has room for more rows, but for no sequence of their own."""
    tokens = torch.arange(3, 40)
    (wanted,) = runner.run(Chunk(1, 0, tokens))
    (plain,) = runner.run(Chunk(1, 30, tokens[30:]))
    inputs = runner.inputs((Chunk(1, 30, tokens[30:]),), num_padding=5)
    starts = torch.tensor([0, len(inputs.positions)])
    inputs = dataclasses.replace(
        inputs,
        row_sequence=torch.zeros_like(inputs.row_sequence),
        sequence_starts=starts,
        sequence_slots=inputs.sequence_slots[:1],
        block_tables={"global": inputs.block_tables["global"][:1]},
    )
    before = [ring.clone() for ring in runner.caches.window]
    with torch.inference_mode():
        logits = runner.model.forward(inputs).logits
    assert torch.equal(logits, plain)
    assert torch.equal(logits, wanted[30:])
    assert all(map(torch.equal, before, runner.caches.window))


@pytest.mark.parametrize("operation", ["nonzero", "item", "tolist", "unique", "bincount"])
def test_the_guard_sees_an_operation(operation: str) -> None:
    values = torch.ones(1, dtype=torch.int64)
    with static_shapes(), pytest.raises(NotStaticError, match=operation):
        getattr(values, operation)()


def test_the_guard_sees_masks_and_copies_of_host_values() -> None:
    values = torch.arange(4)
    with static_shapes():
        for fault in (
            lambda: values[values > 2],
            lambda: torch.tensor([1, 2]),
            lambda: values.repeat_interleave(values),
            lambda: values.__setitem__(values, 0),
        ):
            with pytest.raises(NotStaticError):
                fault()
        assert values[values.clamp_max(2)].shape == (4,)
        values[1:] = 0
