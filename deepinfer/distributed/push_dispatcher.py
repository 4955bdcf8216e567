"""The dispatcher of GPUs of one host: rows are written straight into the memory of the ranks that want them.

Every place is fixed beforehand, so no counts travel and a graph may hold an exchange: row t of rank s lies in place
`s * max_rows + t` on every rank that holds one of its experts, and travels once to each of them, however many of its
experts are there. The answer to its column k comes back as row `t * K + k` of the rank's own answers. So R * max_rows
places are enough for any routing, and nothing can overflow.

One set of buffers serves all layers: a rank writes the rows of the next exchange only when every rank has sent all
answers of this one, thus has read its rows; and answers only when every rank has begun the next one, thus has used the
answers before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deepinfer.distributed.expert_order import first_expert
from deepinfer.distributed.peer_memory import PeerMemory, open_peer_memory
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.push_layout import FLAG_BYTES, ID_BYTES, WEIGHT_BYTES, Region, lay_out, link_bytes
from deepinfer.distributed.token_dispatcher import Dispatched, ExchangeShape
from deepinfer.errors import RankError
from deepinfer.kernels.nvidia.push import meet, push_answers, push_rows
from deepinfer.kernels.ops import ExpertRows
from deepinfer.log import get_logger

_LOGGER = get_logger("exchange")
_POLLS_PER_SECOND = 1_000_000  # about: a look at the flags takes most of a microsecond


class PushLink:
    """What the dispatchers of a rank share: the memory, the number of the meeting, and the alarm."""

    def __init__(
        self, memory: PeerMemory, shapes: Sequence[ExchangeShape], *, role: str, rank: int, timeout_seconds: float
    ) -> None:
        """`memory` has the bytes that `link_bytes` tells. A rank that does not come within about `timeout_seconds` is
        an error."""
        device = memory.own.device
        self.role, self.rank, self.num_ranks = role, rank, len(memory.peers)
        self.memory = memory
        self.timeout_seconds = timeout_seconds
        self._regions = lay_out(shapes, self.num_ranks)
        for region in self._regions:
            memory.own[region.ids : region.weights].fill_(255)  # -1: nothing has arrived
        self._flags = memory.own[: self.num_ranks * FLAG_BYTES].view(torch.int64)
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._is_rehearsal = False

    @property
    def is_active(self) -> bool:
        """Whether what is launched now is part of an exchange, now or when the graph that records it is replayed."""
        return not self._is_rehearsal or (self._flags.is_cuda and torch.cuda.is_current_stream_capturing())

    def region_for(self, columns: int, row_bytes: int) -> Region:
        """Return the smallest buffers that such rows fit into."""
        same_columns = [region for region in self._regions if region.shape.columns == columns]
        fitting = [region for region in same_columns if region.shape.row_bytes >= row_bytes]
        assert fitting, f"no buffers for rows of {row_bytes} bytes and {columns} columns"
        return min(fitting, key=lambda region: region.shape.row_bytes)

    def meet(self) -> None:
        """Wait, on the device, until all ranks have got this far."""
        meet(
            self._flags,
            peers=self.memory.peers,
            state=self._state,
            alarm=self._alarm,
            rank=self.rank,
            max_polls=int(self.timeout_seconds * _POLLS_PER_SECOND),
            active=self.is_active,
        )

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What runs in here on this rank alone moves nothing, meets nobody and gets nothing; what is recorded will."""
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    def check(self) -> None:
        """Raise RankError if an exchange that has ended on the device had not all ranks in it."""
        if int(self._alarm[0]) != 0:
            message = (
                f"an exchange of {self.num_ranks} ranks lasted over {self.timeout_seconds:g} s; one hangs or is gone"
            )
            raise RankError(message, role=self.role, rank=self.rank)


@dataclass(slots=True, frozen=True)
class _Sent:
    """What `combine` must know of a dispatch: `expert_ids` [T, K] as they were given."""

    expert_ids: torch.Tensor
    region: Region


class PushDispatcher:
    """See `token_dispatcher.TokenDispatcher`. Equal to `LocalDispatcher` bit for bit, for any number of ranks.

    `Dispatched.rows` has num_ranks * max_rows rows, whatever arrived. What `dispatch` and `combine` return is
    overwritten by the next exchange of the same shape.
    """

    batch_invariant = True
    capturable = True

    def __init__(self, link: PushLink, num_experts: int) -> None:
        """Spread `num_experts` logical experts over the ranks of `link`; only the device thread uses it."""
        assert num_experts >= link.num_ranks, f"{num_experts} experts on {link.num_ranks} ranks"
        self.rank, self.num_ranks = link.rank, link.num_ranks
        self._link = link
        starts = [
            first_expert(rank, num_ranks=link.num_ranks, num_experts=num_experts) for rank in range(link.num_ranks + 1)
        ]
        self._starts = torch.tensor(starts, dtype=torch.int64).to(link.memory.own.device)

    def dispatch(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Push each row to the ranks of its experts."""
        link, columns = self._link, expert_ids.shape[1]
        row_bytes = rows.shape[1] * rows.element_size()
        region = link.region_for(columns, row_bytes)
        assert len(rows) <= region.shape.max_rows, f"{len(rows)} rows, but room for {region.shape.max_rows}"
        push_rows(
            rows,
            expert_ids,
            weights,
            starts=self._starts,
            peers=link.memory.peers,
            offsets=(region.rows, region.ids, region.weights),
            rank=self.rank,
            max_rows=region.shape.max_rows,
            active=link.is_active,
        )
        link.meet()
        places = self.num_ranks * region.shape.max_rows
        own = link.memory.own
        arrived_ids = own[region.ids :][: places * columns * ID_BYTES].view(torch.int64).view(places, columns)
        if not link.is_active:
            # what lies there is of another exchange, perhaps of more experts or of a larger table
            arrived_ids = torch.full_like(arrived_ids, -1)
        return Dispatched(
            rows=own[region.rows :][: places * row_bytes].view(rows.dtype).view(places, rows.shape[1]),
            expert_ids=arrived_ids,
            expected_copies=expert_ids.numel(),  # as if all ranks sent as many
            weights=own[region.weights :][: places * columns * WEIGHT_BYTES].view(torch.float32).view(places, columns),
            handle=_Sent(expert_ids, region),
        )

    def combine(self, expert_rows: ExpertRows, dispatched: Dispatched) -> ExpertRows:
        """Push the experts' rows back to the ranks of their tokens."""
        sent: _Sent = dispatched.handle
        link, shape, values = self._link, sent.region.shape, expert_rows.values
        answer_bytes = values.shape[1] * values.element_size()
        assert answer_bytes == shape.answer_bytes, f"answers of {answer_bytes} bytes, not {shape.answer_bytes}"
        push_answers(
            values,
            expert_rows.places,
            dispatched.expert_ids,
            peers=link.memory.peers,
            offset=sent.region.answers,
            max_rows=shape.max_rows,
            active=link.is_active,
        )
        link.meet()
        count = sent.expert_ids.numel()
        answers = link.memory.own[sent.region.answers :][: count * answer_bytes].view(values.dtype)
        numbers = torch.arange(count, device=values.device).view_as(sent.expert_ids)
        return ExpertRows(answers.view(count, values.shape[1]), torch.where(sent.expert_ids < 0, -1, numbers))


def open_link(
    groups: ProcessGroups, shapes: Sequence[ExchangeShape], *, device: torch.device, timeout_seconds: float
) -> PushLink | None:
    """Return this rank's link to the others of its host; None, on all, where that can't be. A collective."""
    group, memory = groups.dispatch, None
    num_bytes = link_bytes(shapes, group.num_ranks)
    try:
        memory = open_peer_memory(group, groups.store, num_bytes, device)
    except RuntimeError as error:
        _LOGGER.warning("the GPUs of %d ranks can't write each other's memory (%s)", group.num_ranks, error)
    link = None
    if memory is not None:
        link = PushLink(memory, shapes, role=group.role, rank=group.rank, timeout_seconds=timeout_seconds)
        torch.cuda.synchronize(device)
    # also: nobody pushes before everybody has cleared
    if not bool(group.all_gather(torch.tensor([int(link is not None)])).all()):
        return None
    _LOGGER.info("%d ranks push rows to each other, %.2f GiB of buffers each", group.num_ranks, num_bytes / 2**30)
    return link
