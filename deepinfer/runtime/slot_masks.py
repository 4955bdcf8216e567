"""The grammars of the sequences in a rank's slots: followed on the host, turned into the masks of a step.

The masks of a step need the results of all steps before it. So they are built while its rows run, and it draws last.
They are filled one after the other: threads make it slower, since each mask takes too short a time to share the lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepinfer.scheduler.step_plan import StepOutput, StepPlan
from deepinfer.structured_outputs.bitmask import StepMasks
from deepinfer.structured_outputs.grammar import RequestGrammar, SequenceGrammar


@dataclass(slots=True)
class _SlotState:
    """`num_tokens`: tokens known of the sequence. `drafts`: those that its next step may verify."""

    grammar: SequenceGrammar
    num_tokens: int
    drafts: tuple[int, ...] = ()
    has_failed: bool = False


class SlotMasks:
    """Only the step thread uses it. `max_drafts`: most rows of a slot beside its first one."""

    def __init__(self, max_drafts: int) -> None:
        """No slot has a grammar."""
        self._max_drafts = max_drafts
        self._states: dict[int, _SlotState] = {}

    def admit(self, plan: StepPlan) -> None:
        """Take over the sequences that get a slot with `plan`; output that they bring along is followed."""
        for admission in plan.admissions:
            self._states.pop(admission.slot, None)
            if admission.grammar is not None:
                assert isinstance(admission.grammar, RequestGrammar), admission.grammar
                output = admission.token_ids[admission.num_prompt_tokens :].tolist()
                self._states[admission.slot] = _SlotState(admission.grammar.begin(output), len(admission.token_ids))

    def needs_results(self, plan: StepPlan) -> bool:
        """Whether the masks of `plan` depend on steps before it."""
        return any(slot in self._states for slot in plan.decode_slots.tolist())

    def build(self, plan: StepPlan) -> StepMasks | None:
        """Return the masks of `plan`, None if none of its slots has a grammar. All steps before it have been taken."""
        slots = [slot for slot in _drawing_slots(plan) if slot in self._states]
        if not slots:
            return None
        states = [self._states[slot] for slot in slots]
        words = torch.empty((len(slots), 1 + self._max_drafts, states[0].grammar.num_words), dtype=torch.int32)
        for state, rows in zip(states, words, strict=True):
            num_valid = state.grammar.fill(rows, state.drafts)
            rows[num_valid + 1 :] = rows[num_valid]  # no draft behind can be accepted: any mask will do
        return StepMasks(
            slots=torch.tensor(slots, dtype=torch.int64),
            positions=torch.tensor([state.num_tokens for state in states], dtype=torch.int64),
            words=words,
        )

    def take(self, plan: StepPlan, output: StepOutput) -> None:
        """Follow what the decode slots of a step committed, and keep the drafts that it left for the next one."""
        places = {slot: place for place, slot in enumerate(plan.decode_slots.tolist())}
        for result in output.slots:
            state = self._states.get(result.slot)
            if state is None or result.slot not in places:
                continue
            token_ids = result.token_ids.tolist()
            state.grammar.accept(token_ids)
            state.num_tokens += len(token_ids)
            if token_ids:
                drafts = () if output.draft_ids is None else output.draft_ids[places[result.slot]].tolist()
                state.drafts = tuple(drafts)

    def take_failures(self) -> Iterator[tuple[int, str]]:
        """Yield slots whose sequence can't go on, and why; each once."""
        for slot, state in self._states.items():
            if state.grammar.failure is not None and not state.has_failed:
                state.has_failed = True
                yield slot, state.grammar.failure


def _drawing_slots(plan: StepPlan) -> list[int]:
    return [chunk.slot for chunk in plan.chunks if chunk.samples] + plan.decode_slots.tolist()
