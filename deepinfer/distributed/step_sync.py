"""What the ranks of a group agree on before each step: one small all-gather on the step thread.

Ranks park together: only when nobody has work and all have seen the same wake. The driver sends every admission's
`wake_id`, which grows, to all ranks of the group; so a rank that leaves its park knows that every other one will too,
and no collective is open while a group is parked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from deepinfer.distributed.process_groups import Group


@dataclass(slots=True, frozen=True)
class StepProposal:
    """One rank's state. `has_work`: sequences waiting, running or in flight. `wake_id`: the newest seen.

    `num_rows`: rows of its next step, 0 if it has none. `wants_drafts`: that step should draft for the one behind it.
    """

    has_work: bool
    num_rows: int
    wake_id: int
    stopping: bool
    wants_drafts: bool = False


@dataclass(slots=True, frozen=True)
class StepAgreement:
    """What all ranks do next, in this order of strength.

    `stop`: some rank is to stop, so all do. `park`: wait for a newer wake. `max_rows` above 0: run one step now,
    padding where a rank has no rows. Else no step: handle what is in flight and agree again. `is_drafting`: some rank
    wants drafts, so all draft: that is a collective, too.
    """

    anyone_has_work: bool
    max_rows: int
    park: bool
    stop: bool
    is_drafting: bool = False


class StepSync(Protocol):
    """A collective of the group's step threads."""

    def agree(self, proposal: StepProposal) -> StepAgreement:
        """Wait for every rank's proposal; raises RankError when one does not come in time."""
        ...


class LocalStepSync:
    """The agreement of a group of one."""

    def agree(self, proposal: StepProposal) -> StepAgreement:
        """Agree with oneself."""
        return _conclude([proposal])


class GroupStepSync:
    """The agreement over a process group that nothing else uses."""

    def __init__(self, group: Group) -> None:
        """Use `group`, from the step thread only."""
        self._group = group

    def agree(self, proposal: StepProposal) -> StepAgreement:
        """Gather all proposals and conclude the same everywhere."""
        own = (
            proposal.has_work,
            proposal.num_rows,
            proposal.wake_id,
            proposal.stopping,
            proposal.wants_drafts,
        )
        gathered = self._group.all_gather(torch.tensor(own, dtype=torch.int64)).tolist()
        return _conclude(
            [
                StepProposal(bool(work), rows, wake, stopping=bool(stopping), wants_drafts=bool(wants_drafts))
                for work, rows, wake, stopping, wants_drafts in gathered
            ]
        )


def _conclude(proposals: list[StepProposal]) -> StepAgreement:
    anyone_has_work = any(proposal.has_work for proposal in proposals)
    same_wake = len({proposal.wake_id for proposal in proposals}) == 1
    return StepAgreement(
        anyone_has_work=anyone_has_work,
        max_rows=max(proposal.num_rows for proposal in proposals),
        park=not anyone_has_work and same_wake,
        stop=any(proposal.stopping for proposal in proposals),
        is_drafting=any(proposal.wants_drafts for proposal in proposals),
    )
