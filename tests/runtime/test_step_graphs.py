"""Steps padded to tiers and recorded: answers are those of steps that fit, and nothing in a step reads the device.

A graph is replaced by a function that runs its work again, and once more when it is recorded, as a platform may.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_model import VOCAB_SIZE, fake_groups
from support.oracle import Accepted, OracleDrafter
from support.rank_engines import Answer, answer_all, build_fake_rank, make_request
from support.static_shapes import allow_op, allow_ops, static_shapes

from deepinfer.codec import unpack
from deepinfer.distributed.local_dispatcher import LocalDispatcher
from deepinfer.kernels.reference.sampling import gumbel_argmax
from deepinfer.kernels.registry import select_kernels
from deepinfer.models.model_spec import ForwardInputs, ForwardOutput
from deepinfer.protocol import Request, SamplingParams
from deepinfer.runtime.batch_inputs import DecodeRows
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.speculation import Speculation
from deepinfer.runtime.step_graphs import StepGraphs, tier_sizes
from deepinfer.scheduler.step_plan import BlockGrant, DraftBudget, PrefillChunk, SlotAdmission, StepOutput, StepPlan
from deepinfer.speculative.cost_table import CostTable
from deepinfer.speculative.drafter import Anchors, Drafts
from deepinfer.speculative.verifier import RejectionVerifier, SharedNoiseVerifier, Verifier
from deepinfer.structured_outputs.bitmask import StepMasks, num_words


def _capture(work: Callable[[], Any]) -> Callable[[], Any]:
    work()
    return work


class _CapturableOracle(OracleDrafter):
    capturable = True


def _requests(count: int, **sampling: Any) -> list[Request]:
    numbers = random.Random(5)
    return [
        make_request(
            place,
            [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 20))],
            **{"max_tokens": numbers.randrange(2, 40), "temperature": 0.0 if place % 3 == 0 else 1.0} | sampling,
        )
        for place in range(count)
    ]


def _visible(answers: dict[int, Answer]) -> dict[int, tuple[Any, ...]]:
    return {
        index: (answer.token_ids, answer.finish, b"".join(part.values for part in answer.logprobs))
        for index, answer in answers.items()
    }


def _answer(requests: list[Request], **rank: Any) -> dict[int, Answer]:
    return answer_all(build_fake_rank("prefill").engine, build_fake_rank("decode", **rank).engine, requests)


def test_tiers_cover_every_number_of_sequences() -> None:
    assert tier_sizes(1) == (1,)
    assert tier_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert tier_sizes(300)[-5:] == (96, 128, 192, 256, 300)
    assert tier_sizes(256)[-3:] == (128, 192, 256)


@pytest.mark.parametrize("kind", ["plain", "with rules, truncation and log-probabilities"])
def test_tiers_change_no_answer_of_plain_decoding(kind: str) -> None:
    wishes: dict[str, Any] = {} if kind == "plain" else {"top_p": 0.9, "logprobs": 2, "presence_penalty": 1.0}
    requests = _requests(13, **wishes)
    assert _visible(_answer(requests, capture=_capture)) == _visible(_answer(requests))


@pytest.mark.parametrize("oracle", [OracleDrafter, _CapturableOracle])
@pytest.mark.parametrize("costs", [None, CostTable((1, 8), (0, 5), ((1.0, 1.6), (1.0, 8.0)), (1.0, 1.0))])
def test_tiers_change_no_answer_under_drafts(oracle: type[OracleDrafter], costs: CostTable | None) -> None:
    """Runs of every length, with budgets or without; every fourth sequence wants more than a plain draw."""
    requests = _requests(9) + [
        make_request(place, [place, 5], logprobs=1, top_k=9, frequency_penalty=0.5) for place in range(9, 12)
    ]
    plain = _answer(requests)
    known = [unpack(request.prompt_token_ids).tolist() + plain[request.index].token_ids for request in requests]
    log = Accepted()
    drafted = _answer(
        requests,
        max_drafts=5,
        make_drafter=partial(oracle, sequences=known, hit_rate=0.75, vocab_size=VOCAB_SIZE, log=log),
        capture=_capture,
        costs=costs,
    )
    assert _visible(drafted) == _visible(plain)
    assert log.committed_per_pass > (1.02 if costs else 2)


def test_a_step_takes_the_smallest_tier_and_pads_it() -> None:
    seen: list[tuple[list[int], list[int], int]] = []
    graphs = StepGraphs(_capture, max_sequences=6, max_drafts=3, device=torch.device("cpu"))
    graphs.record_largest("work", lambda rows: seen.append((rows.slots.tolist(), [], rows.num_rows)))
    assert seen == [([0] * 6, [], 24)]
    seen.clear()

    def work(rows: Any) -> None:
        seen.append((rows.slots.tolist(), rows.num_drafts.tolist(), rows.num_rows))

    slots, drafts = torch.tensor([5, 2, 4]), torch.tensor([1, -1, 0])
    graphs.run("other", work, DecodeRows(slots, drafts, 3 * (1 + 2)))
    assert seen == [([0] * 4, [-1] * 4, 12), ([5, 2, 4, 0], [1, -1, 0, -1], 12)]  # recorded with padding, then run
    graphs.run("other", work, DecodeRows(slots[:2], drafts[:2], 2 + 1))  # a budget of one draft for both
    assert seen[-1] == ([5, 2], [1, -1], 4)
    graphs.run("other", work, DecodeRows(slots, drafts, 9))
    assert len(seen) == 5


class _Plain:
    """A model whose logits depend on token and position; nothing else is kept."""

    draft_network = None
    capturable = True

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        wanted = slice(None) if inputs.logit_rows is None else inputs.logit_rows
        rows = inputs.token_ids[wanted] * 31 + inputs.positions[wanted] * 7
        return ForwardOutput(((rows[:, None] * torch.arange(1, VOCAB_SIZE + 1)) % 61).float() / 7)


class _Same:
    """Drafts the anchor, again and again."""

    capturable = True

    def draft(self, anchors: Anchors) -> Drafts:
        token_ids = anchors.token_table[anchors.slots, anchors.positions].to(torch.int64)[:, None].expand(-1, 3)
        scores = token_ids[:, :, None] + torch.zeros(VOCAB_SIZE)
        return Drafts(token_ids, token_ids / 9.0, scores)


def _runner(verifier: Verifier, *, is_rejection: bool, capture: Any) -> ModelRunner:
    table = SlotTable(
        num_slots=9,
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        eos_token_id=0,
        groups=fake_groups(4),
        device=torch.device("cpu"),
        bad_word_ids=lambda params: ((3,), (4, 5)),
        gumbel_argmax=allow_op(gumbel_argmax),
        max_drafts=3,
        keeps_draft_scores=is_rejection,
    )
    return ModelRunner(
        model=_Plain(),
        caches=None,
        table=table,
        kernels=allow_ops(select_kernels("cpu", numerics="reference", batch_invariant=False, overrides={})),
        dispatcher=LocalDispatcher(8),
        speculation=Speculation(table, drafter=_Same(), verifier=verifier),
        capture=capture,
    )


def _plans() -> list[tuple[StepPlan, StepMasks | None]]:
    wishes = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.8, "logprobs": 2},
        {"top_k": 5, "min_p": 0.01},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "min_tokens": 4, "logit_bias": {4: 2.0}},
        {"bad_words": ("x",), "allowed_token_ids": tuple(range(0, 64, 2)), "max_tokens": 3},
    ]
    admissions = tuple(
        SlotAdmission(place + 1, np.array([7, place, 9], np.int32), 2, SamplingParams(**{"seq_seed": place} | wish))
        for place, wish in enumerate(wishes)
    )
    grants = tuple(BlockGrant(place + 1, "global", 0, np.array([place + 1], np.int32)) for place in range(len(wishes)))
    every, plain = np.arange(1, 7, dtype=np.int32), np.array([1, 2], np.int32)
    words = torch.full((1, 4, num_words(VOCAB_SIZE)), 0x0F0F0F0F, dtype=torch.int32)
    masks = StepMasks(torch.tensor([2]), torch.tensor([3]), words)
    prompt = SlotAdmission(7, np.array([5, 6, 7], np.int32), 3, SamplingParams(seq_seed=9, prompt_logprobs=1, n=2))
    several = SlotAdmission(8, np.array([5, 6], np.int32), 2, SamplingParams(seq_seed=9), num_samples=2)
    return [
        (StepPlan(0, admissions=admissions, grants=grants, decode_slots=every, max_rows_per_slot=4), masks),
        (StepPlan(1, decode_slots=every, max_rows_per_slot=4), None),
        (StepPlan(2, decode_slots=plain, draft_budget=DraftBudget(2)), None),
        (StepPlan(3, decode_slots=every, draft_budget=DraftBudget(3, 4, (1.0, 2.0, 1.0))), None),
        (
            StepPlan(
                4,
                admissions=(prompt, several),
                chunks=(PrefillChunk(7, 0, 2, samples=False), PrefillChunk(8, 0, 2, samples=True)),
                decode_slots=plain,
            ),
            None,
        ),
        (StepPlan(5), None),
        (StepPlan(6, decode_slots=plain, draft_budget=DraftBudget(0), is_drafting=False), None),
        (StepPlan(7, decode_slots=plain, draft_budget=DraftBudget(0)), None),
        (StepPlan(8, decode_slots=plain, is_drafting=False), None),
    ]


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
@pytest.mark.parametrize("capture", [None, _capture])
def test_nothing_in_a_step_reads_the_device_or_has_its_shape_from_it(rule: str, capture: Any) -> None:
    """Rules, truncation, masks, log-probabilities, budgets, samples, prompts and ended sequences included."""
    is_rejection = rule == "rejection"
    verifier = RejectionVerifier() if is_rejection else SharedNoiseVerifier()
    runner = _runner(verifier, is_rejection=is_rejection, capture=capture)
    found = []
    for plan, masks in _plans():
        with static_shapes():
            runner.start_step(plan)
            pending = runner.finish_step(plan, masks)
        found.append(pending.resolve())
    lengths = Counter(slot.slot for output in found for slot in output.slots for _ in slot.token_ids)
    assert lengths[6] == 2  # at its limit in the third step
    assert all(lengths[slot] >= 3 for slot in range(1, 6))
    assert found[4].prompt_logprobs.keys() == {7}
    assert [output.draft_ids is None for output in found[6:]] == [True, False, True]
    assert not any(slot.failure for output in found for slot in output.slots)


def test_recorded_steps_leave_no_large_result_each() -> None:
    """What a recorded step returns stays in memory as long as its graph does, and there is one for each tier."""
    results: list[Any] = []

    def capture(work: Callable[[], Any]) -> Callable[[], Any]:
        work()

        def replay() -> Any:
            results.append(work())
            return results[-1]

        return replay

    runner = _runner(RejectionVerifier(), is_rejection=True, capture=capture)
    one, two = np.array([3], np.int32), np.array([1, 2], np.int32)
    every, masks = _plans()[0]
    plans = (every, StepPlan(1, decode_slots=one, max_rows_per_slot=4), StepPlan(2, decode_slots=two))
    for plan in plans:
        runner.start_step(plan)
        runner.finish_step(plan, masks if plan is every else None).resolve()
    (_, first), (_, second), (_, drafts) = results
    assert (len(first), len(second)) == (8 * 4, 1 * 4)
    assert first.data_ptr() == second.data_ptr()
    assert drafts.scores is None
    assert runner.kept_bytes == 8 * 4 * VOCAB_SIZE * 4
    assert _runner(RejectionVerifier(), is_rejection=True, capture=None).kept_bytes == 0


def test_a_step_recorded_behind_one_with_masks_does_not_hold_them() -> None:
    """A graph would apply them in every later step of its size, from memory that holds something else by then."""

    def decoded(slot: int, *, grammar: object | None) -> StepPlan:
        admission = SlotAdmission(slot, np.array([7, 8], np.int32), 2, SamplingParams(seq_seed=1), grammar=grammar)
        grant = BlockGrant(slot, "global", 0, np.array([slot], np.int32))
        slots = np.array([slot], np.int32)
        return StepPlan(0, admissions=(admission,), grants=(grant,), decode_slots=slots, max_rows_per_slot=4)

    def run(runner: ModelRunner, plan: StepPlan, masks: StepMasks | None) -> StepOutput:
        runner.start_step(plan)
        return runner.finish_step(plan, masks).resolve()

    plain = decoded(2, grammar=None)
    (alone,) = run(_runner(SharedNoiseVerifier(), is_rejection=False, capture=_capture), plain, None).slots
    runner = _runner(SharedNoiseVerifier(), is_rejection=False, capture=_capture)
    words = torch.full((1, 4, num_words(VOCAB_SIZE)), 0x0F0F0F0F, dtype=torch.int32)
    run(runner, decoded(2, grammar="a grammar"), StepMasks(torch.tensor([2]), torch.tensor([5]), words))
    (behind,) = run(runner, plain, None).slots
    assert behind.failure is None
    assert behind.token_ids.tolist() == alone.token_ids.tolist()


def test_nothing_is_recorded_where_nothing_is_drafted() -> None:
    """A graph of no work: torch warns of it, and each tier would have one."""
    recorded: list[Any] = []

    def capture(work: Callable[[], Any]) -> Callable[[], Any]:
        recorded.append(work())
        return work

    answers = _answer(_requests(3, logprobs=1), capture=capture)
    assert all(answer.failure is None for answer in answers.values())
    assert recorded
    assert None not in recorded


def test_a_step_of_prompts_is_tried_without_the_logits_of_all_its_rows() -> None:
    """They would be the largest thing in it: 34 GB at 65,536 rows of the released vocabulary."""
    runner = _runner(SharedNoiseVerifier(), is_rejection=False, capture=None)
    seen: list[tuple[int, int]] = []
    runner._model.forward = lambda inputs: seen.append((len(inputs.token_ids), len(inputs.logit_rows)))  # type: ignore[method-assign]
    runner.run_padding(2, 50, num_logits=4)
    assert seen == [(50, 4)]
