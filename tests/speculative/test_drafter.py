"""The chain of drafts: a row's bias comes from the token before, its noise from the position."""

from __future__ import annotations

import pytest
import torch
from support.token_rows import admit
from torch import Tensor

from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.kernels.reference.sampling import gumbel_argmax
from deepinfer.models.model_spec import DraftBlock, DraftInputs
from deepinfer.protocol import SamplingParams
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.drafter import Anchors, ChainDrafter, Drafts

VOCAB, BLOCK, DRAFT_PURPOSE = 12, 5, 16


class FakeNetwork:
    """Token t is followed by t + 1 (the Markov bias alone); base logits are `base` [BLOCK, VOCAB]."""

    block_size = BLOCK
    num_experts = 1

    def __init__(self, base: Tensor) -> None:
        self.base = base
        self.inputs: list[DraftInputs] = []

    def run(self, inputs: DraftInputs) -> DraftBlock:
        self.inputs.append(inputs)
        count = len(inputs.slots)
        numbers = torch.arange(inputs.num_drafts).float()
        return DraftBlock(self.base[: inputs.num_drafts].repeat(count, 1, 1), numbers.repeat(count, 1)[:, :, None])

    def markov_bias(self, token_ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((token_ids + 1) % VOCAB, VOCAB).float() * 3

    def confidence(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        return hidden[:, 0] * 100 + token_ids


def _draft(
    base: Tensor, *, max_drafts: int = BLOCK, independent: bool = False, with_confidence: bool = True
) -> tuple[Drafts, FakeNetwork]:
    """Slot 1 is greedy, slot 2 draws; their anchors are tokens 4 and 10 at positions 3 and 7."""
    state = SamplingState(3, VOCAB, torch.device("cpu"), eos_token_id=0)
    admit(state, 1, SamplingParams(temperature=0.0, seq_seed=1), num_prompt_tokens=1)
    admit(state, 2, SamplingParams(temperature=0.5, seq_seed=2), num_prompt_tokens=1)
    table = torch.zeros(3, 20, dtype=torch.int32)
    table[1, 3], table[2, 7] = 4, 10
    network = FakeNetwork(base)
    drafter = ChainDrafter(
        network,
        max_drafts=max_drafts,
        caches=None,
        dispatcher=LocalDispatcher(1),
        state=state,
        independent=independent,
        with_confidence=with_confidence,
    )
    slots = torch.tensor([1, 2, 0])
    return drafter.draft(Anchors(slots, torch.tensor([3, 7, 0]), torch.tensor([4, 10, 0]), table, (1, 2))), network


def test_a_greedy_chain_follows_the_token_before() -> None:
    drafts, network = _draft(torch.zeros(BLOCK, VOCAB))
    assert drafts.token_ids[0].tolist() == [5, 6, 7, 8, 9]
    assert drafts.scores is None
    (inputs,) = network.inputs
    assert inputs.anchor_ids.tolist() == [4, 10, 0]
    assert inputs.anchor_positions.tolist() == [3, 7, 0]
    assert inputs.slots.tolist() == [1, 2, 0]


def test_confidence_knows_the_token_before_a_draft_not_the_draft() -> None:
    drafts, _ = _draft(torch.zeros(BLOCK, VOCAB))
    assert drafts.confidence is not None
    assert drafts.confidence[0].tolist() == [4, 105, 206, 307, 408]
    assert _draft(torch.zeros(BLOCK, VOCAB), with_confidence=False)[0].confidence is None


@pytest.mark.parametrize("independent", [False, True])
def test_draws_use_the_noise_of_their_position_and_temperature(independent: bool) -> None:
    base = torch.randn(BLOCK, VOCAB, generator=torch.Generator().manual_seed(1))
    drafts, network = _draft(base, independent=independent)
    previous = torch.tensor([10])
    for row in range(BLOCK):
        scores = (base[row] + network.markov_bias(previous)) / 0.5
        purpose = DRAFT_PURPOSE + row if independent else 0
        previous = gumbel_argmax(scores, torch.tensor([2]), torch.tensor([8 + row]), torch.ones(1), purpose=purpose)
        assert drafts.token_ids[1, row] == previous
        if drafts.scores is not None:
            assert torch.equal(drafts.scores[1, row], scores[0])
    assert (drafts.scores is not None) is independent


def test_fewer_drafts_are_the_first_of_the_whole_block() -> None:
    base = torch.randn(BLOCK, VOCAB, generator=torch.Generator().manual_seed(2))
    whole, _ = _draft(base)
    some, _ = _draft(base, max_drafts=2)
    assert torch.equal(some.token_ids, whole.token_ids[:, :2])
    assert some.confidence is not None
    assert whole.confidence is not None
    assert torch.equal(some.confidence, whole.confidence[:, :2])
