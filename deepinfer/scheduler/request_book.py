"""The driver's book of unfinished requests: their jobs, sequences, trips and reservations, and every way they change.

Invariants: every unfinished sequence stands in `samples` and belongs to one trip; a trip stands in `trips` until its
KV is sent to a decode rank; what a trip has reserved is freed as each of its sequences leaves it. A piece of a prefill
rank's memory belongs to its trip until then, and to the batch that it is sent with from then on.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from deepinfer.log import about, get_logger
from deepinfer.protocol import FinishCode, Request, RequestFailure, Role
from deepinfer.scheduler.load_balancer import LoadBalancer
from deepinfer.scheduler.piece_book import PieceBook
from deepinfer.scheduler.request_state import Job, Phase, RequestState, SampleState, Trip, error_output

_LOGGER = get_logger("driver")


@dataclass(slots=True)
class SchedulerCounts:
    """Sequences by phase, and totals since the start (`num_finished` and `num_failed` count requests)."""

    num_waiting: int = 0
    num_prefilling: int = 0
    num_prefilled: int = 0
    num_decoding: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_preempted: int = 0
    num_replayed: int = 0
    kv_bytes_in_flight: int = 0


class RequestBook:
    """Bookkeeping only: what to send, and what results mean, is decided by `BatchScheduler`."""

    def __init__(self, balancer: LoadBalancer, *, max_attempts: int, first_index: int = 0) -> None:
        """Start empty. `balancer` holds the reservations; the first sequence gets `first_index`."""
        self._balancer = balancer
        self._max_attempts = max_attempts
        self._next_index = first_index
        self.jobs: dict[str, Job] = {}
        self.samples: dict[int, SampleState] = {}  # every unfinished sequence, by index
        self.trips: dict[int, Trip] = {}  # trips that are not decoding yet, by the index of their request
        # heap of (-priority, turn, index); entries of ended trips are skipped
        self.waiting: list[tuple[int, int, int]] = []
        self._turn = 0  # of the request that was started last
        self.aborts: Mapping[Role, defaultdict[int, list[int]]] = {  # per rank: indexes that it shall drop
            "prefill": defaultdict(list),
            "decode": defaultdict(list),
        }
        self.pieces = PieceBook()
        self.totals = SchedulerCounts()

    def counts(self) -> SchedulerCounts:
        """Return the totals with the present number of sequences in each phase."""
        phases = Counter(sample.trip.phase for sample in self.samples.values())
        return replace(
            self.totals,
            num_waiting=phases[Phase.WAITING],
            num_prefilling=phases[Phase.PREFILLING],
            num_prefilled=phases[Phase.PREFILLED],
            num_decoding=phases[Phase.DECODING],
        )

    def add(self, job_id: str, request: Request) -> None:
        """Enter a new request, numbering its sequences.

        Jobs take turns: a job's requests have turns that follow each other, from the turn on that is being served. So
        of equal priority one request of each job is started, then the next of each, however many a job has sent.
        """
        job = self.jobs[job_id]
        turn = max(job.next_turn, self._turn)
        job.next_turn = turn + 1
        request = msgspec.structs.replace(request, index=self._next_index)
        self._next_index += request.num_samples
        owner = RequestState(job_id, request, set(range(request.index, self._next_index)), turn)
        job.requests[request.request_id] = owner
        trip = Trip(request, num_attempts=1)
        for sample in range(request.num_samples):
            index = request.index + sample
            self.samples[index] = SampleState(index, sample, owner, trip)
        self.enqueue(trip, turn)

    def enqueue(self, trip: Trip, turn: int) -> None:
        """Let a new trip wait: by priority, then by turn, then by age."""
        self.trips[trip.request.index] = trip
        heapq.heappush(self.waiting, (-trip.request.priority, turn, trip.request.index))

    def next_waiting(self) -> Trip | None:
        """Return the trip that is to be started next; it stays in line until `pop_waiting`."""
        while self.waiting:
            trip = self.trips.get(self.waiting[0][2])
            if trip is not None and trip.phase is Phase.WAITING:
                return trip
            heapq.heappop(self.waiting)
        return None

    def pop_waiting(self) -> None:
        """Take the first trip out of the line: it has been started."""
        _, turn, _ = heapq.heappop(self.waiting)
        self._turn = max(self._turn, turn)

    def finish(self, sample: SampleState, code: FinishCode) -> None:
        """A sequence has ended: put out its output; with the last one its request is forgotten."""
        owner = sample.owner
        job = self.jobs[owner.job_id]
        job.outputs.append(sample.take_output(code))
        job.unsent.pop(sample.index, None)
        self._leave_trip(sample)
        del self.samples[sample.index]
        owner.open_indexes.remove(sample.index)
        if not owner.open_indexes:
            self.totals.num_finished += 1
            del job.requests[owner.request.request_id]

    def fail(self, owner: RequestState, failure: RequestFailure) -> None:
        """A request has failed: put out its error and drop it."""
        _LOGGER.warning("%s: %s", failure.kind, failure.text, extra=_about(owner))
        self.totals.num_failed += 1
        self.jobs[owner.job_id].outputs.append(error_output(owner.request, failure))
        self.drop(owner)

    def drop(self, owner: RequestState) -> None:
        """Forget a request wherever its sequences are."""
        job = self.jobs[owner.job_id]
        del job.requests[owner.request.request_id]
        for index in owner.open_indexes:
            sample = self.samples.pop(index)
            trip = sample.trip
            job.unsent.pop(index, None)
            if trip.phase is Phase.DECODING:
                self.aborts["decode"][trip.decode_rank].append(index)
            elif trip.phase is Phase.PREFILLING:
                self.aborts["prefill"][trip.prefill_rank].append(trip.request.index)
            self._leave_trip(sample)
            self._end_before_decode(trip)

    def may_retry(self, trip: Trip, failure: RequestFailure) -> bool:
        """Say whether what failed on this trip may go on another one."""
        return failure.retryable and trip.num_attempts < self._max_attempts

    def retry(self, trip: Trip, failure: RequestFailure) -> None:
        """All sequences of a trip have lost their place: send them again, or fail their request."""
        indexes = range(trip.request.index, trip.request.index + trip.request.num_samples)
        samples = [self.samples[index] for index in indexes if index in self.samples]
        samples = [sample for sample in samples if sample.trip is trip]
        if not samples:
            return  # another trip of the same request has failed it
        if not self.may_retry(trip, failure):
            self.fail(samples[0].owner, failure)
            return
        _LOGGER.info("sent again: %s", failure.text, extra=_about(samples[0].owner))
        was_prefilling = trip.phase is Phase.PREFILLING
        self._end_before_decode(trip)
        if not was_prefilling:
            for sample in samples:
                self.replay(sample, trip.num_attempts + 1)
            return
        self.totals.num_replayed += 1
        again = Trip(trip.request, num_attempts=trip.num_attempts + 1)
        for sample in samples:
            self._leave_trip(sample)
            sample.trip = again
        self.enqueue(again, samples[0].owner.turn)

    def replay(self, sample: SampleState, num_attempts: int) -> None:
        """Send a sequence with its output so far on a trip of its own."""
        self.totals.num_replayed += 1
        self._leave_trip(sample)
        sample.trip = Trip(sample.replay_request(), num_attempts)
        self.enqueue(sample.trip, sample.owner.turn)

    def _end_before_decode(self, trip: Trip) -> None:
        """Take a trip that is not decoding out of the books; again, or for a decoding one, does nothing."""
        if self.trips.get(trip.request.index) is trip:
            del self.trips[trip.request.index]
            if trip.phase is Phase.PREFILLING:
                self._balancer.end_prefill(trip.prefill_rank, trip.num_tokens)
            trip.phase = Phase.OVER
            self.pieces.release(trip.piece)
            trip.piece = None

    def _leave_trip(self, sample: SampleState) -> None:
        """Free what is reserved for a sequence, if its trip has started."""
        trip = sample.trip
        if trip.decode_rank < 0:
            return
        self._balancer.free(trip.decode_rank, trip.blocks_per_sequence, is_settled=sample.is_settled)
        if not sample.is_settled:
            self.settle(trip)
        sample.is_settled = False

    def settle(self, trip: Trip) -> None:
        """One more sequence needs the hand-over buffer no longer; after the last one its bytes don't count."""
        trip.num_unsettled -= 1
        if trip.num_unsettled == 0:
            self.set_kv_bytes(trip, 0)

    def set_kv_bytes(self, trip: Trip, kv_bytes: int) -> None:
        """Let a trip count for `kv_bytes` of hand-overs in flight."""
        self.totals.kv_bytes_in_flight += kv_bytes - trip.kv_bytes
        trip.kv_bytes = kv_bytes


def _about(owner: RequestState) -> dict[str, object]:
    return about(request=owner.request.request_id, row=owner.request.label)
