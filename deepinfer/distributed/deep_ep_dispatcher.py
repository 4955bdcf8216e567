"""The dispatcher of ranks in several hosts, by DeepEP's elastic buffer: NVLink inside a host, RDMA between hosts.

DeepEP adds the answers of a token's experts on their way home; we don't want that, since the bits would then depend on
where experts are. So each (row, column) travels as a token of its own with one expert: nothing is left to add, and the
answers come home one by one. In a group of many ranks few experts of a row share one, so little travels twice.

Rows go out as the bytes they are. Answers are bf16: DeepEP adds zero to each, which makes +0 of -0 and keeps all other
numbers. What it can't carry goes through another dispatcher: float32, and table look-ups, whose answers are bytes.

It ran with DeepEP 2.1.0 on two GPUs of one host (`EP_DISABLE_GIN=1`, for want of a network), never between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.functional import pad

from deepinfer.distributed.process_groups import Group, ProcessGroups
from deepinfer.distributed.token_dispatcher import Dispatched, ExchangeShape, TokenDispatcher
from deepinfer.errors import RankError
from deepinfer.kernels.ops import ExpertRows
from deepinfer.log import get_logger

_LOGGER = get_logger("exchange")
_ROW_ALIGNMENT = 16  # bytes: what its copies of rows move at once
_ANSWER_ALIGNMENT = 256  # numbers: what a warp of its sum reads at once
_NOTIFIED = 128  # threads that count arrivals from other hosts: one for each rank of the host and each own expert
_ROW_TYPES = (torch.bfloat16, torch.uint8)  # of experts whose answers are bf16


class DeepEpLink:
    """What the dispatchers of a rank share: DeepEP's buffer and how many copies of rows it has room for."""

    def __init__(self, buffer: Any, shapes: Sequence[ExchangeShape], group: Group) -> None:
        """`buffer` is a `deep_ep.ElasticBuffer` that has room for the `shapes`, all of which it can carry."""
        self.buffer, self.group = buffer, group
        self._shapes = shapes

    def serves(self, num_experts: int) -> bool:
        """Whether it can spread so many experts: equally many on each rank, and not too many between hosts."""
        share, rest = divmod(num_experts, self.group.num_ranks)
        is_one_host = self.buffer.num_scaleout_ranks == 1
        return rest == 0 and (is_one_host or self.buffer.num_scaleup_ranks + share <= _NOTIFIED)

    def room_for(self, rows: torch.Tensor, columns: int) -> int | None:
        """Return the most copies that a rank may send, equal on all ranks; None where such rows go another way."""
        row_bytes = rows.shape[1] * rows.element_size()
        fitting = [shape for shape in self._shapes if shape.columns == columns and shape.row_bytes >= row_bytes]
        if not fitting or rows.dtype not in _ROW_TYPES or row_bytes % _ROW_ALIGNMENT:
            return None
        return max(shape.max_rows for shape in fitting) * columns


@dataclass(slots=True, frozen=True)
class _Sent:
    """What `combine` must know of a dispatch: `expert_ids` [T, K] as given, and `order` [R] that arrivals were put in.

    `handle` is DeepEP's.
    """

    expert_ids: torch.Tensor
    order: torch.Tensor
    handle: Any


class DeepEpDispatcher:
    """See `token_dispatcher.TokenDispatcher`. Equal to `LocalDispatcher` but for the sign of zeros.

    The host waits for the number of arrivals, so no graph holds an exchange.
    """

    batch_invariant = True
    capturable = False

    def __init__(self, link: DeepEpLink, num_experts: int, others: TokenDispatcher) -> None:
        """Spread `num_experts` over the ranks of `link`, which serves so many; `others` takes what DeepEP can't."""
        group = link.group
        assert link.serves(num_experts), f"{num_experts} experts on {group.num_ranks} ranks"
        self.rank, self.num_ranks = group.rank, group.num_ranks
        self._link, self._num_experts, self._others = link, num_experts, others

    def dispatch(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Send each row to each of its experts."""
        columns = expert_ids.shape[1]
        max_copies = self._link.room_for(rows, columns)
        if max_copies is None:
            return self._others.dispatch(rows, expert_ids, weights)
        assert expert_ids.numel() <= max_copies, f"{expert_ids.numel()} copies, but room for {max_copies}"
        try:
            arrived, local_ids, arrived_weights, handle, _ = self._link.buffer.dispatch(
                rows.repeat_interleave(columns, 0),
                topk_idx=expert_ids.reshape(-1, 1),
                topk_weights=weights.reshape(-1, 1),
                num_experts=self._num_experts,
                num_max_tokens_per_rank=max_copies,
            )
        except RuntimeError as error:
            raise self._failure("dispatch", error) from error
        # they lie as they came; their first number tells source rank and copy
        order = handle.recv_src_metadata[:, 0].argsort()
        return Dispatched(
            rows=arrived[order],
            expert_ids=local_ids[order],
            weights=arrived_weights[order],
            expected_copies=expert_ids.numel(),  # as if all ranks sent as many
            handle=_Sent(expert_ids, order, handle),
        )

    def combine(self, expert_rows: ExpertRows, dispatched: Dispatched) -> ExpertRows:
        """Return each answer to the rank of its token."""
        sent = dispatched.handle
        if not isinstance(sent, _Sent):
            return self._others.combine(expert_rows, dispatched)
        places = expert_rows.places.flatten()
        answers = expert_rows.values[torch.empty_like(places).scatter_(0, sent.order, places)]
        width = answers.shape[1]
        try:
            values, _, _ = self._link.buffer.combine(_widened(answers), sent.handle)
        except RuntimeError as error:
            raise self._failure("combine", error) from error
        numbers = torch.arange(len(values), device=values.device).view_as(sent.expert_ids)
        return ExpertRows(values[:, :width].contiguous(), torch.where(sent.expert_ids < 0, -1, numbers))

    def _failure(self, what: str, error: RuntimeError) -> RankError:
        group = self._link.group
        message = f"DeepEP's {what} of {group.num_ranks} ranks failed; a rank is gone or hangs ({error})"
        return RankError(message, role=group.role, rank=group.rank)


class _Members:
    """The part of a process group that DeepEP uses, over groups that are not registered with torch."""

    def __init__(self, group: Group, nccl: Any) -> None:
        self._group, self._nccl = group, nccl

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.num_ranks

    def barrier(self) -> None:
        self._group.all_gather(torch.zeros(1))

    def _get_backend(self, _: torch.device) -> Any:
        """Return the NCCL group, whose communicator DeepEP uses."""
        return self._nccl


def carried(shapes: Sequence[ExchangeShape]) -> list[ExchangeShape]:
    """Return those of `shapes` that DeepEP may carry."""
    return [shape for shape in shapes if shape.row_bytes % _ROW_ALIGNMENT == 0]


def _padded(width: int) -> int:
    """Return to how many bf16 numbers an answer of `width` is made up."""
    return -(-width // _ANSWER_ALIGNMENT) * _ANSWER_ALIGNMENT


def _widened(answers: torch.Tensor) -> torch.Tensor:
    short = _padded(answers.shape[1]) - answers.shape[1]
    return pad(answers, (0, short)) if short else answers


def make_dispatcher(link: DeepEpLink, others: Callable[[int], TokenDispatcher], num_experts: int) -> TokenDispatcher:
    """Return the dispatcher for `num_experts`; `others(num_experts)` makes that for what DeepEP can't carry."""
    if not link.serves(num_experts):
        _LOGGER.warning(
            "DeepEP can't spread %d experts over %d ranks: their rows go through the hosts' memory, which is slow",
            num_experts,
            link.group.num_ranks,
        )
        return others(num_experts)
    return DeepEpDispatcher(link, num_experts, others(num_experts))


def open_deep_ep(
    package: ModuleType | None,
    groups: ProcessGroups,
    shapes: Sequence[ExchangeShape],
    *,
    device: torch.device,
    timeout_seconds: float,
) -> DeepEpLink | None:
    """Return this rank's link to the others by `package`, the module `deep_ep`; None, on all, where that can't be.

    A collective.
    """
    group, fitting = groups.dispatch, carried(shapes)
    usable = package is not None and hasattr(package, "ElasticBuffer") and bool(fitting)
    if not _all_say(group, usable):
        return None
    link = None
    try:
        link = DeepEpLink(_open_buffer(package, groups, fitting, device, timeout_seconds), fitting, group)
    except (RuntimeError, AssertionError) as error:  # it checks GPUs and network by either
        _LOGGER.warning("DeepEP can't connect %d ranks (%s)", group.num_ranks, error)
    return link if _all_say(group, link is not None) else None


def _all_say(group: Group, answer: bool) -> bool:
    return bool(group.all_gather(torch.tensor([int(answer)])).all())


def _open_buffer(
    package: Any, groups: ProcessGroups, shapes: list[ExchangeShape], device: torch.device, timeout_seconds: float
) -> Any:
    """Return an ElasticBuffer with room for any of `shapes`, of which it serves one at a time; a collective."""
    members = _Members(groups.dispatch, _connect(groups, device))
    num_bytes = max(
        package.ElasticBuffer.get_buffer_size_hint(
            members,
            shape.max_rows * shape.columns,
            _padded(max(shape.row_bytes, shape.answer_bytes) // torch.bfloat16.itemsize),
            num_topk=1,
        )
        for shape in shapes
    )
    seconds = max(1, round(timeout_seconds))
    buffer = package.ElasticBuffer(
        members,
        num_bytes=num_bytes,
        num_cpu_timeout_secs=seconds,
        num_gpu_timeout_secs=seconds,
        explicitly_destroy=True,  # else the end of a process waits for the other ranks
    )
    _LOGGER.info("%d ranks exchange rows by DeepEP, %.2f GiB of buffers each", members.size(), num_bytes / 2**30)
    return buffer


def _connect(groups: ProcessGroups, device: torch.device) -> Any:
    """Form an NCCL group that torch's process-wide registry does not know."""
    group = groups.dispatch
    nccl: Any = dist.ProcessGroupNCCL  # torch's type stubs leave parts of it out
    formed = nccl(PrefixStore(f"{group.role}/deep_ep", groups.store), group.rank, group.num_ranks, nccl.Options())
    formed.eager_connect_single_device(device)
    return formed
