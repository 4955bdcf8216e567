"""Chooses ranks for the driver, from what it has reserved and what ranks report.

Prefill: the rank with the fewest outstanding tokens. Decode: the rank with the largest unreserved share of what it is
shortest of, blocks of a group or slots; then the fewest sequences. So short sequences spread by their number, which is
what a step in lock-step costs, and long ones by their cache. Ties go to the lower rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.protocol import RankLoad, Request

_FINISH_MEMORY = 0.9  # how much of the finish rate of a decode rank lives on from one result to the next


@dataclass(slots=True, frozen=True)
class DecodeCapacity:
    """What a decode rank said when it was ready: `num_blocks` per paged group and `num_slots`, padding included."""

    rank: int
    num_blocks: Mapping[str, int]
    num_slots: int


@dataclass(slots=True, eq=False)
class _DecodeRank:
    """Reservations on one decode rank, per group in the balancer's order.

    `unsettled_blocks` belong to sequences that the rank's reports don't show yet.
    """

    rank: int
    capacity: tuple[int, ...]
    num_slots: int
    reserved_blocks: list[int]
    unsettled_blocks: list[int]
    reported_free: tuple[int, ...]
    num_reserved: int = 0
    num_settled: int = 0
    finishes_per_result: float = 0.0
    free_share: float = 1.0

    def num_free(self, group: int) -> int:
        """Unreserved blocks; a report counts only while sequences of the rank keep it fresh."""
        free = self.capacity[group] - self.reserved_blocks[group]
        if self.num_settled:
            free = min(free, self.reported_free[group] - self.unsettled_blocks[group])
        return free

    def add_blocks(self, totals: list[int], blocks: tuple[int, ...], count: int) -> None:
        """Add `count` sequences to one of the totals."""
        for group, number in enumerate(blocks):
            totals[group] += count * number

    def update_share(self) -> None:
        """Set `free_share`, the unreserved share of the scarcest group or of the slots, after a change."""
        shares = [self.num_free(group) / capacity for group, capacity in enumerate(self.capacity) if capacity]
        self.free_share = min(*shares, 1.0, 1 - self.num_reserved / max(1, self.num_slots))

    def has_room(self, blocks_per_sequence: tuple[int, ...], num_sequences: int) -> bool:
        """True when the sequences fit; an empty rank takes anything that its capacity allows."""
        if self.num_reserved == 0:
            return True
        if self.num_reserved + num_sequences > self.num_slots + self.max_ready():
            return False
        return all(num_sequences * count <= self.num_free(group) for group, count in enumerate(blocks_per_sequence))

    def max_ready(self) -> int:
        """Sequences beyond the slots that may be on their way, so that a freed slot finds its successor waiting.

        They cover the finishes of two results, and at least half of the slots, for the time spent in prefill.
        """
        return min(self.num_slots, max((self.num_slots + 1) // 2, round(2 * self.finishes_per_result)))


class LoadBalancer:
    """Reservations on all ranks. A sequence is reserved, then settled by its rank's first report of it, then freed."""

    def __init__(
        self, *, groups: tuple[KVGroup, ...], prefill_ranks: Sequence[int], decode_ranks: Sequence[DecodeCapacity]
    ) -> None:
        """Start with nothing reserved. `groups` are those of the decode ranks."""
        self._groups = tuple(group for group in groups if group.kind == "paged")
        self._prefill_tokens = dict.fromkeys(sorted(prefill_ranks), 0)
        self._decode: dict[int, _DecodeRank] = {}
        for rank in sorted(decode_ranks, key=lambda rank: rank.rank):
            capacity = tuple(max(0, rank.num_blocks[group.name] - 1) for group in self._groups)
            zeros = [0] * len(capacity)
            self._decode[rank.rank] = _DecodeRank(
                rank.rank, capacity, rank.num_slots - 1, zeros, list(zeros), reported_free=capacity
            )

    @property
    def prefill_ranks(self) -> list[int]:
        """The prefill ranks, ascending."""
        return list(self._prefill_tokens)

    @property
    def decode_ranks(self) -> list[int]:
        """The decode ranks, ascending."""
        return list(self._decode)

    def fits(self, num_tokens: int) -> bool:
        """True when some empty decode rank could hold a sequence of `num_tokens` tokens."""
        blocks = self._blocks_for(num_tokens)
        return any(all(map(int.__le__, blocks, rank.capacity)) for rank in self._decode.values())

    def choose_prefill(self) -> int:
        """Return the prefill rank for the next request."""
        return min(self._prefill_tokens, key=self._prefill_tokens.__getitem__)

    def start_prefill(self, rank: int, num_tokens: int) -> None:
        """Count a request's tokens as outstanding."""
        self._prefill_tokens[rank] += num_tokens

    def end_prefill(self, rank: int, num_tokens: int) -> None:
        """The tokens are no longer outstanding."""
        self._prefill_tokens[rank] -= num_tokens

    def reserve(self, request: Request, num_known_tokens: int, max_expected: int) -> tuple[int, tuple[int, ...]] | None:
        """Reserve room for all sequences of `request` on one decode rank.

        A sequence is expected to grow to its `max_tokens`, but not by more than `max_expected` tokens. Returns the
        rank and the blocks reserved for each sequence, or None when no rank has room.
        """
        limit = request.num_prompt_tokens + request.sampling.max_tokens
        wanted = self._blocks_for(min(limit, num_known_tokens + max_expected))
        count = request.num_samples
        for rank in self._by_preference():
            blocks = tuple(min(need, capacity // count) for need, capacity in zip(wanted, rank.capacity, strict=True))
            if rank.has_room(blocks, count):
                rank.num_reserved += count
                rank.add_blocks(rank.reserved_blocks, blocks, count)
                rank.add_blocks(rank.unsettled_blocks, blocks, count)
                rank.update_share()
                return rank.rank, blocks
        return None

    def settle(self, rank: int, blocks: tuple[int, ...]) -> None:
        """The rank's reports show this sequence from now on."""
        state = self._decode[rank]
        state.num_settled += 1
        state.add_blocks(state.unsettled_blocks, blocks, -1)
        state.update_share()

    def free(self, rank: int, blocks: tuple[int, ...], *, is_settled: bool) -> None:
        """A sequence has left the rank, or will never reach it."""
        state = self._decode[rank]
        state.num_reserved -= 1
        state.add_blocks(state.reserved_blocks, blocks, -1)
        if is_settled:
            state.num_settled -= 1
        else:
            state.add_blocks(state.unsettled_blocks, blocks, -1)
        state.update_share()

    def report(self, rank: int, load: RankLoad, num_finished: int) -> None:
        """Take over a decode rank's own numbers, and how many sequences its result finished."""
        state = self._decode[rank]
        state.finishes_per_result = max(_FINISH_MEMORY * state.finishes_per_result, float(num_finished))
        if load.num_free_blocks:
            state.reported_free = tuple(load.num_free_blocks[group.name] for group in self._groups)
        state.update_share()

    def is_idle(self) -> bool:
        """True when nothing is reserved or outstanding anywhere."""
        return not any(self._prefill_tokens.values()) and not any(
            rank.num_reserved or rank.num_settled or any(rank.reserved_blocks) or any(rank.unsettled_blocks)
            for rank in self._decode.values()
        )

    def _by_preference(self) -> Iterator[_DecodeRank]:
        """Yield the decode ranks, best first; sorting waits until the best one is refused, which is rare."""
        yield min(self._decode.values(), key=_preference)
        yield from sorted(self._decode.values(), key=_preference)[1:]

    def _blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(group.num_blocks_for(num_tokens) for group in self._groups)


def _preference(rank: _DecodeRank) -> tuple[float, int, int]:
    return -rank.free_share, rank.num_reserved, rank.rank
