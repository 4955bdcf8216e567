"""The draft network beyond parity: company, padding, undone tokens and hand-overs leave no bit of a draft changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.draft_case import DraftRunner, draft_model, load_draft_model
from support.golden_case import golden_model, load_model, mode_kernels
from support.step_runner import Chunk, StepRunner
from torch import Tensor

from deepinfer.kernels.ops import Activations, AdvanceStreams
from deepinfer.models.deepseek_v41.caches import DRAFT_GROUP
from deepinfer.models.deepseek_v41.dspark_rings import FeatureTap
from deepinfer.models.model_spec import DraftBlock, KVPart
from tests.support.paths import GOLDEN

W16 = GOLDEN / "w16"
WINDOW, RING, BLOCK = 16, 28, 5


def make_tokens(seed: int, length: int) -> Tensor:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def runner() -> DraftRunner:
    return DraftRunner(draft_model(W16, "ref"), max_tokens=128)


def same(one: DraftBlock, other: DraftBlock) -> bool:
    return torch.equal(one.logits, other.logits) and torch.equal(one.hidden, other.hidden)


def row(block: DraftBlock, index: int) -> DraftBlock:
    return DraftBlock(block.logits[index : index + 1], block.hidden[index : index + 1])


def _pieces(tokens: Tensor) -> list[Tensor]:
    """Chunks of 1, 2, 29 and 3 tokens, and again, until nothing is left."""
    parts: list[Tensor] = []
    while len(tokens):
        size = (1, 2, 29, 3)[len(parts) % 4]
        parts.append(tokens[:size])
        tokens = tokens[size:]
    return parts


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, RING, 70])
def test_chunks_of_the_context_do_not_change_drafts(runner: DraftRunner, length: int) -> None:
    tokens = make_tokens(length, length)
    runner.run_tokens(1, tokens)
    for part in _pieces(tokens):
        runner.run_tokens(2, part)
    whole, pieces = runner.block((1, 9)), runner.block((2, 9))
    assert same(whole, pieces)


def test_other_sequences_and_padding_do_not_change_drafts(runner: DraftRunner) -> None:
    for slot, length in ((1, 40), (2, 3), (3, 17)):
        runner.run_tokens(slot, make_tokens(slot, length))
    alone = runner.block((2, 50))
    together = runner.block((3, 7), (2, 50), (1, 8), num_padding=2)
    assert same(row(together, 1), alone)
    assert runner.block(num_padding=1).logits.shape == (1, BLOCK, 512)
    assert runner.block().logits.shape == (0, BLOCK, 512)


@pytest.mark.parametrize("num_drafts", range(1, BLOCK + 1))
def test_drafts_that_nobody_wants_change_no_other(runner: DraftRunner, num_drafts: int) -> None:
    for slot, length in ((1, 40), (2, 3)):
        runner.run_tokens(slot, make_tokens(slot, length))
    whole = runner.block((1, 9), (2, 50), num_padding=1)
    some = runner.block((1, 9), (2, 50), num_padding=1, num_drafts=num_drafts)
    assert same(some, DraftBlock(whole.logits[:, :num_drafts], whole.hidden[:, :num_drafts]))


def test_drafts_depend_on_the_window_alone(runner: DraftRunner) -> None:
    """Every row of the block sees the last 16 positions before the anchor, all of them, and no other."""
    runner.run_tokens(1, make_tokens(5, 40))
    plain = runner.block((1, 50))
    for position in range(40 - RING, 40):
        ring = runner.caches.draft[0]
        place = RING + position % RING  # slot 1
        kept = ring[place].clone()
        ring[place] = ring[place].roll(16)
        changed = (runner.block((1, 50)).hidden != plain.hidden).any(2)[0]
        ring[place] = kept
        assert changed.tolist() == [position >= 40 - WINDOW] * BLOCK, position


def test_every_row_of_the_block_sees_every_other(runner: DraftRunner) -> None:
    """The anchor's token reaches all rows, through their keys: there is no causal mask, and it is no noise token."""
    runner.run_tokens(1, make_tokens(6, 20))
    one, other = runner.block((1, 50)), runner.block((1, 51))
    assert (one.hidden != other.hidden).any(2).all()


@pytest.mark.parametrize("num_wrong", [1, 5])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 26, 27, 28, 29, 55, 56])
def test_undone_tokens_leave_no_trace_in_drafts(runner: DraftRunner, length: int, num_wrong: int) -> None:
    """`num_wrong` rejected drafts behind each of the alignments mod 2 and mod ring."""
    tokens = make_tokens(length, length + 1)
    runner.run_tokens(1, tokens)
    plain = runner.block((1, 60))
    runner.run_tokens(2, tokens[:-1])
    runner.run_tokens(2, torch.cat((tokens[-1:], make_tokens(99, num_wrong))))
    runner.lengths[2] -= num_wrong
    assert same(runner.block((2, 60)), plain)
    # Two more passes, each undone in part: twelve rows ahead at most.
    for _ in range(2):
        runner.run_tokens(2, make_tokens(98, 6))
        runner.lengths[2] -= 6
    following = make_tokens(3, 1)
    runner.run_tokens(1, following)
    runner.run_tokens(2, following)
    assert same(runner.block((2, 61)), runner.block((1, 61)))


def hand_over(runner: DraftRunner, source: int, target: int, *, draft_rows: int | None = None) -> None:
    """Hand a sequence over; with `draft_rows` only that many rows of the draft rings."""
    model, caches, count = runner.runner.model, runner.caches, runner.lengths[source]
    parts = model.export_kv(caches, slot=source, block_ids=runner.runner.block_ids(source, count), num_tokens=count)
    if draft_rows is not None:
        parts = tuple(_cut(part, draft_rows) if part.group == DRAFT_GROUP else part for part in parts)
    model.import_kv(
        caches, slot=target, block_ids=runner.runner.block_ids(target, count), num_tokens=count, parts=parts
    )
    runner.runner.token_table[target] = runner.runner.token_table[source]
    runner.lengths[target] = count


def _cut(part: KVPart, count: int) -> KVPart:
    """The last `count` rows of each stage's ring."""
    rows = part.data.view(3, part.num_records, -1)[:, part.num_records - count :]
    return KVPart(part.group, part.first_position + part.num_records - count, count, rows.flatten().contiguous())


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 31, 60])
def test_a_hand_over_carries_the_draft_rings(runner: DraftRunner, length: int) -> None:
    runner.run_tokens(2, make_tokens(1, 90))  # leftovers of another sequence
    runner.run_tokens(1, make_tokens(2, length))
    hand_over(runner, 1, 2)
    for token in make_tokens(3, 3):
        assert same(runner.block((1, 77)), runner.block((2, 77)))
        runner.run_tokens(1, token[None])
        runner.run_tokens(2, token[None])


@pytest.mark.parametrize("draft_rows", [0, 1, 7])
def test_drafting_goes_on_with_fewer_rows(runner: DraftRunner, draft_rows: int) -> None:
    """Rows that did not come are not seen; once the window has filled up again nothing is missing."""
    runner.run_tokens(2, make_tokens(1, 90))
    runner.run_tokens(1, make_tokens(2, 50))
    hand_over(runner, 1, 2, draft_rows=draft_rows)
    fewer = runner.block((2, 77))
    assert torch.isfinite(fewer.logits).all()
    assert not torch.equal(fewer.hidden, runner.block((1, 77)).hidden)
    came = {position % RING for position in range(50 - draft_rows, 50)}
    for ring in runner.caches.draft:
        ring[[2 * RING + place for place in range(RING) if place not in came]] = 0
    assert same(runner.block((2, 77)), fewer)
    more = make_tokens(3, WINDOW - draft_rows)
    runner.run_tokens(1, more)
    runner.run_tokens(2, more)
    assert same(runner.block((1, 77)), runner.block((2, 77)))


def test_the_markov_chain_follows_the_token_before(runner: DraftRunner) -> None:
    """Bias row t is head . embed[t], so without base logits drafts follow the arg-max from token to token."""
    network = runner.network
    tokens = make_tokens(8, 30)
    weights = draft_model(W16, "ref").draft_network
    assert weights is not None
    bias = network.markov_bias(tokens)
    wanted = weights.markov_embedding[tokens].float() @ weights.markov_head.float().t()
    assert torch.allclose(bias, wanted, rtol=1e-5, atol=1e-5)
    assert len(set(bias.argmax(1).tolist())) > 10


def test_confidence_reads_the_hidden_state_and_the_token_before(runner: DraftRunner) -> None:
    runner.run_tokens(1, make_tokens(4, 12))
    hidden = runner.block((1, 5)).hidden[0]
    network = runner.network
    tokens = torch.tensor([5, 6, 7, 8, 9])
    weight = draft_model(W16, "ref").draft_network.confidence_weight  # type: ignore[union-attr]
    joined = torch.cat((hidden.float(), network.markov_embedding[tokens].float()), 1)  # type: ignore[attr-defined]
    assert torch.allclose(network.confidence(hidden, tokens), joined @ weight[0].float(), rtol=1e-4, atol=1e-4)


def test_features_are_the_mean_of_the_streams_that_enter_a_layer() -> None:
    model = draft_model(W16, "fp32_noq")
    streams = [torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(number)) for number in range(4)]
    tap = FeatureTap((1, 3), model.kernels)
    for layer, entering in enumerate(streams):
        tap(layer, entering)
    wanted = torch.cat((streams[1].mean(1), streams[3].mean(1)), 1)
    assert torch.allclose(tap.features(), wanted, atol=1e-6)


def test_drafting_does_not_change_the_model(runner: DraftRunner) -> None:
    """Logits with draft rings in use are those of the model without, bit for bit."""
    tokens = make_tokens(9, 33)
    with_rings = runner.run_tokens(1, tokens)
    runner.block((1, 4))
    (logits,) = StepRunner(golden_model(W16, "ref"), max_tokens=128).run(Chunk(1, 0, tokens))
    assert torch.equal(with_rings, logits)


class _OtherRounding:
    """A fused kernel that does not have the bits of the kernels whose place it takes, as those of GPUs."""

    def __init__(self, inner: AdvanceStreams) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, Activations]:
        streams, hidden = self._inner(*args, **options)
        return streams * (1 + 2**-6), hidden


def test_the_same_kernels_run_with_and_without_drafts() -> None:
    kernels = mode_kernels("ref")
    kernels = dataclasses.replace(kernels, advance_streams=_OtherRounding(kernels.advance_streams))
    tokens = make_tokens(1, 40)
    models = load_draft_model(W16, kernels), load_model(W16, kernels)
    (drafting,), (plain,) = (StepRunner(model, max_tokens=128).run(Chunk(1, 0, tokens)) for model in models)
    assert torch.equal(drafting, plain)
