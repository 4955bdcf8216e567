"""The driver's scheduler: holds every unfinished request, decides which rank gets it, and replays what was lost.

Pure and synchronous; a call takes microseconds per request. A request leaves the queue only with reserved room on a
decode rank and while the hand-overs in flight are below their bound, so prefilled KV never piles up.

Wake rule: the ranks of a group step together, and park together when nobody has work and all have seen the same
`wake_id`. So every admission carries a new `wake_id` and goes to all ranks of its group, to most as an empty batch: a
rank that has seen it keeps the group awake until the rank with the work has too. Aborts alone need no wake, nor do
pieces of memory that a prefill rank gets back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deepinfer.codec import pack, unpack, unpack_codes
from deepinfer.config import SchedulerConfig
from deepinfer.errors import RequestError
from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.log import get_logger
from deepinfer.protocol import (
    AdmittedRequest,
    DecodeBatch,
    DecodeResult,
    FinishCode,
    LogprobColumns,
    PrefillBatch,
    PrefilledRequest,
    PrefillResult,
    Request,
    RequestFailure,
    RequestOutput,
    Role,
)
from deepinfer.scheduler.load_balancer import DecodeCapacity, LoadBalancer
from deepinfer.scheduler.logprob_columns import slice_logprobs
from deepinfer.scheduler.piece_book import RankPiece
from deepinfer.scheduler.request_book import RequestBook, SchedulerCounts
from deepinfer.scheduler.request_state import Job, Phase, SampleState, Trip
from deepinfer.scheduler.sampling_params import resolve_seed

_LOGGER = get_logger("driver")
_UNREACHABLE = (
    "hand-overs go through the host's object store from now on, since a decode rank can't read a prefill rank's memory "
    "(%s): that takes about half a second for a prompt of 131,072 tokens, where it would be milliseconds"
)


@dataclass(slots=True, frozen=True)
class OutgoingBatch:
    """A batch to send. `buffers`: for a `DecodeBatch`, what `on_prefill_result` was given for its admitted requests.

    `pieces`: where the other admitted requests have their KV; `on_batch_over` gives them back.
    """

    role: Role
    rank: int
    batch: PrefillBatch | DecodeBatch
    buffers: tuple[object, ...] = ()
    pieces: tuple[RankPiece, ...] = ()


class BatchScheduler:
    """All unfinished requests of all jobs. Called by the driver's loop only.

    `decode_ranks` say what they hold; `groups` are the KV groups of the decode ranks. `draw_seed` gives 63 random
    bits. A request that loses its rank more than `max_attempts - 1` times fails. `max_expected_output_tokens`: how
    much output a sequence gets reserved beyond what it has, if its `max_tokens` is larger. `first_index` and
    `first_wake_id` lie above what the ranks have seen from an earlier driver.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        prefill_ranks: Sequence[int],
        decode_ranks: Sequence[DecodeCapacity],
        groups: tuple[KVGroup, ...],
        draw_seed: Callable[[], int],
        max_attempts: int = 3,
        max_expected_output_tokens: int = 4096,
        first_index: int = 0,
        first_wake_id: int = 0,
    ) -> None:
        """Start with both groups ready and no request."""
        self._config = config
        self._groups = groups
        self._draw_seed = draw_seed
        self._max_expected_output_tokens = max_expected_output_tokens
        self._balancer = LoadBalancer(groups=groups, prefill_ranks=prefill_ranks, decode_ranks=decode_ranks)
        self._book = RequestBook(self._balancer, max_attempts=max_attempts, first_index=first_index)
        self._handovers: list[Trip] = []
        self._is_lost: dict[Role, bool] = {"prefill": False, "decode": False}
        self._wake_ids: dict[Role, int] = {"prefill": first_wake_id, "decode": first_wake_id}
        self._next_batch_id = 0
        self._is_draining = False
        self._device_handover = False
        self._has_shared = False  # so decode ranks may have mapped memory of prefill ranks
        self._is_unreachable = False
        self._closes_memory = False

    def allow_device_handover(self, is_allowed: bool) -> None:
        """Say whether decode ranks may be able to read prefill ranks' memory.

        Once one could not, it stays off until the prefill ranks have been started anew.
        """
        self._device_handover = is_allowed and not self._is_unreachable
        self._has_shared = self._has_shared or self._device_handover

    # Jobs

    def submit(self, job_id: str, request: Request) -> None:
        """Take a new request. RequestError when its id is in use in this job, or no rank could ever hold it."""
        job = self._book.jobs.setdefault(job_id, Job())
        if request.request_id in job.requests:
            text = f"request id {request.request_id!r} belongs to a request that is still running; use another id"
            raise RequestError(text, code="duplicate_request_id", param="request_id")
        if not self._is_lost["decode"] and not self._balancer.fits(request.num_prompt_tokens):
            text = (
                f"the cache of a decode rank can't hold {request.num_prompt_tokens} tokens;"
                " shorten the prompt or raise cache.memory_bytes"
            )
            raise RequestError(text, code="cache_too_small", param="prompt")
        sampling = resolve_seed(request.sampling, self._draw_seed)
        self._book.add(job_id, msgspec.structs.replace(request, sampling=sampling))

    def abort(self, job_id: str, request_ids: Iterable[str]) -> None:
        """Give up requests: nothing more is heard of them. Unknown ids are left alone."""
        job = self._book.jobs.get(job_id)
        if job is None:
            return
        for request_id in request_ids:
            owner = job.requests.get(request_id)
            if owner is not None:
                self._book.drop(owner)

    def drop_job(self, job_id: str) -> None:
        """Give up all requests of a job and forget it."""
        if job_id in self._book.jobs:
            self.abort(job_id, list(self._book.jobs[job_id].requests))
            del self._book.jobs[job_id]

    def take_outputs(self, job_id: str) -> tuple[RequestOutput, ...]:
        """Return what happened to a job's requests since the last call."""
        job = self._book.jobs.get(job_id)
        if job is None:
            return ()
        outputs = [*job.outputs, *(sample.take_output(FinishCode.NONE) for sample in job.unsent.values())]
        job.outputs.clear()
        job.unsent.clear()
        return tuple(outputs)

    def take_num_generated(self, job_id: str) -> int:
        """Return how many tokens a job's sequences have got since the last call."""
        job = self._book.jobs.get(job_id)
        if job is None:
            return 0
        num_generated, job.num_generated = job.num_generated, 0
        return num_generated

    def capacity(self, job_id: str) -> int:
        """Return how many more requests a job may submit."""
        job = self._book.jobs.get(job_id)
        return self._config.max_in_flight - (len(job.requests) if job is not None else 0)

    def jobs(self) -> dict[str, int]:
        """Return the number of unfinished requests of each job."""
        return {job_id: len(job.requests) for job_id, job in self._book.jobs.items()}

    def drain(self) -> None:
        """Start nothing more; what has been started goes on to its end."""
        self._is_draining = True

    def counts(self) -> SchedulerCounts:
        """Return the present counts, for status and metrics."""
        return self._book.counts()

    # Batches out

    def next_batches(self) -> list[OutgoingBatch]:
        """Return what to send now: new prefills, hand-overs, aborts. Nothing goes to a group that is lost."""
        batches = []
        if not self._is_lost["prefill"]:
            started = self._start_waiting() if not self._is_lost["decode"] else {}
            for rank in self._ranks_to_call("prefill", self._balancer.prefill_ranks, started):
                prefill_batch = PrefillBatch(
                    batch_id=self._new_batch_id(),
                    wake_id=self._wake_ids["prefill"],
                    requests=tuple(trip.request for trip in started.get(rank, ())),
                    aborted_indexes=pack(self._book.aborts["prefill"].pop(rank, ())),
                    released=pack(self._book.pieces.take(rank)),
                    device_handover=self._device_handover,
                )
                batches.append(OutgoingBatch("prefill", rank, prefill_batch))
        if not self._is_lost["decode"]:
            handed_over = self._start_decoding()
            for rank in self._ranks_to_call("decode", self._balancer.decode_ranks, handed_over):
                trips = handed_over.get(rank, ())
                decode_batch = DecodeBatch(
                    batch_id=self._new_batch_id(),
                    wake_id=self._wake_ids["decode"],
                    admitted=tuple(trip.admitted for trip in trips if trip.admitted is not None),
                    aborted_indexes=pack(self._book.aborts["decode"].pop(rank, ())),
                    closes_memory=self._closes_memory,
                )
                buffers = tuple(trip.buffer for trip in trips if trip.piece is None)
                pieces = tuple(trip.piece for trip in trips if trip.piece is not None)
                batches.append(OutgoingBatch("decode", rank, decode_batch, buffers, pieces))
                for trip in trips:
                    trip.admitted = trip.buffer = trip.piece = None
            self._closes_memory = False
        return batches

    def _ranks_to_call(self, role: Role, ranks: list[int], work: Mapping[int, list[Trip]]) -> list[int]:
        if work:
            self._wake_ids[role] += 1
            return ranks
        if role == "decode" and self._closes_memory:
            return ranks
        without_work = set(self._book.aborts[role])
        return sorted(without_work | self._book.pieces.ranks() if role == "prefill" else without_work)

    def _new_batch_id(self) -> int:
        self._next_batch_id += 1
        return self._next_batch_id

    def _start_waiting(self) -> dict[int, list[Trip]]:
        """Start waiting trips in order while there is room; returns them by prefill rank."""
        started: defaultdict[int, list[Trip]] = defaultdict(list)
        while not self._is_draining and (trip := self._book.next_waiting()) is not None and self._start(trip):
            self._book.pop_waiting()
            started[trip.prefill_rank].append(trip)
        return started

    def _start(self, trip: Trip) -> bool:
        kv_bytes = sum(group.num_blocks_for(trip.num_tokens) * group.bytes_per_block for group in self._groups)
        in_flight = self._book.totals.kv_bytes_in_flight
        if in_flight and in_flight + kv_bytes > self._config.max_kv_bytes_in_flight:
            return False
        reserved = self._balancer.reserve(trip.request, trip.num_tokens, self._max_expected_output_tokens)
        if reserved is None:
            return False
        trip.decode_rank, trip.blocks_per_sequence = reserved
        trip.prefill_rank = self._balancer.choose_prefill()
        trip.phase = Phase.PREFILLING
        trip.num_unsettled = trip.request.num_samples
        self._balancer.start_prefill(trip.prefill_rank, trip.num_tokens)
        self._book.set_kv_bytes(trip, kv_bytes)
        return True

    def _start_decoding(self) -> dict[int, list[Trip]]:
        """Return the trips whose KV is ready, by decode rank."""
        handed_over: defaultdict[int, list[Trip]] = defaultdict(list)
        for trip in self._handovers:
            if trip.phase is Phase.PREFILLED:
                trip.phase = Phase.DECODING
                del self._book.trips[trip.request.index]
                handed_over[trip.decode_rank].append(trip)
        self._handovers.clear()
        return handed_over

    # Results in

    def on_prefill_result(self, rank: int, result: PrefillResult, buffers: Sequence[object] = ()) -> None:
        """Take first tokens and hand-overs. `buffers` belong to the items whose kv has no place, in their order."""
        kv_buffers = iter(buffers)
        for item in result.items:
            place = None if item.kv is None else item.kv.place
            piece = None if place is None else self._book.pieces.hold(rank, place.ticket)
            buffer = next(kv_buffers, None) if item.kv is not None and place is None else None
            trip = self._prefilling_trip(rank, item.index)
            if trip is None:
                self._book.pieces.release(piece)
            else:
                trip.piece = piece
                self._take_prefilled(trip, item, buffer)
        for failure in result.failures:
            trip = self._prefilling_trip(rank, failure.index)
            if trip is not None:
                self._book.retry(trip, failure)

    def on_decode_result(self, rank: int, result: DecodeResult) -> None:
        """Take tokens, ends, preemptions and failures of a decode rank."""
        indexes = unpack(result.sequence_indexes).tolist()
        num_tokens = unpack(result.num_tokens).tolist()
        codes = unpack_codes(result.finish_codes).tolist()
        num_drafted = unpack(result.num_drafted).tolist() or [0] * len(indexes)
        num_accepted = unpack(result.num_accepted).tolist() or [0] * len(indexes)
        logprobs = dict(zip(unpack(result.logprob_sequences).tolist(), result.logprobs, strict=True))
        start = 0
        for place, index in enumerate(indexes):
            stop = start + 4 * num_tokens[place]
            sample = self._decoding_sample(rank, index)
            if sample is not None:
                sample.num_drafted += num_drafted[place]
                sample.num_accepted += num_accepted[place]
                self._take_tokens(sample, result.token_ids[start:stop], logprobs.get(place), FinishCode(codes[place]))
            start = stop
        for failure in result.failures:
            sample = self._decoding_sample(rank, failure.index)
            if sample is None:
                continue
            if failure.kind == "kv_unreachable":  # no fault of the request's: does not count as an attempt
                self._give_up_device_handover(failure)
                self._book.replay(sample, sample.trip.num_attempts)
            elif self._book.may_retry(sample.trip, failure):
                self._book.replay(sample, sample.trip.num_attempts + 1)
            else:
                self._book.fail(sample.owner, failure)
        self._balancer.report(rank, result.load, len(codes) - codes.count(0))

    def on_batch_over(self, outgoing: OutgoingBatch) -> None:
        """A batch has reached its rank, which has fetched what lay in prefill ranks' memory, or it never will."""
        for piece in outgoing.pieces:
            self._book.pieces.release(piece)

    def _give_up_device_handover(self, failure: RequestFailure) -> None:
        if not self._is_unreachable:
            _LOGGER.warning(_UNREACHABLE, failure.text)
        self._is_unreachable = True
        self._device_handover = False

    def on_group_lost(self, role: Role, reason: str) -> int:
        """A role's group is gone with everything on it: replay what it had, or fail what was lost too often.

        A lost prefill group takes along the hand-overs that have not been sent. Returns how many trips were lost.
        Nothing is sent to the group, and no new request starts, before `on_group_ready`.
        """
        self._is_lost[role] = True
        phases = (Phase.DECODING,) if role == "decode" else (Phase.PREFILLING, Phase.PREFILLED)
        lost = {sample.trip: sample for sample in self._book.samples.values() if sample.trip.phase in phases}
        for trip, sample in lost.items():
            failure = RequestFailure(
                request_id=sample.owner.request.request_id,
                index=sample.index,
                kind="rank_lost",
                text=f"the {role} group was lost: {reason}",
                retryable=True,
            )
            self._book.retry(trip, failure)
        self._book.aborts[role].clear()
        if role == "prefill":
            self._book.pieces.forget_all()
        self._closes_memory = role == "prefill" and self._has_shared and not self._is_lost["decode"]
        return len(lost)

    def on_group_ready(self, role: Role) -> None:
        """The group runs again, with the same ranks and capacities as before."""
        self._is_lost[role] = False
        if role == "prefill":
            self._is_unreachable = False  # a rank that was dying may have looked like one whose memory can't be opened

    def _prefilling_trip(self, rank: int, index: int) -> Trip | None:
        trip = self._book.trips.get(index)
        if trip is None or trip.phase is not Phase.PREFILLING or trip.prefill_rank != rank:
            return None
        return trip

    def _decoding_sample(self, rank: int, index: int) -> SampleState | None:
        """Return a sequence that is decoding on `rank`; from now on the rank's reports show it."""
        sample = self._book.samples.get(index)
        if sample is None or sample.trip.phase is not Phase.DECODING or sample.trip.decode_rank != rank:
            return None
        if not sample.is_settled:
            sample.is_settled = True
            self._balancer.settle(rank, sample.trip.blocks_per_sequence)
            self._book.settle(sample.trip)
        return sample

    def _take_prefilled(self, trip: Trip, item: PrefilledRequest, buffer: object) -> None:
        self._balancer.end_prefill(trip.prefill_rank, trip.num_tokens)
        trip.phase = Phase.PREFILLED
        codes = unpack_codes(item.finish_codes).tolist()
        going_on = [place for place, code in enumerate(codes) if code == FinishCode.NONE]
        if item.kv is not None:
            self._book.set_kv_bytes(trip, item.kv.nbytes)
            trip.admitted = AdmittedRequest(
                request=trip.request,
                sample_offsets=pack(going_on),
                first_token_ids=pack(unpack(item.first_token_ids)[going_on]),
                kv=item.kv,
            )
            trip.buffer = buffer
            self._handovers.append(trip)
        else:
            assert not going_on, f"request {item.request_id!r} goes on without a hand-over"
            del self._book.trips[trip.request.index]
        owner = self._book.samples[trip.request.index].owner
        owner.num_cached_tokens = item.num_cached_tokens
        if item.prompt_logprobs is not None:
            owner.add_prompt_logprobs(item.prompt_logprobs)
        for place, code in enumerate(codes):
            sample = self._book.samples.get(trip.request.index + place)
            if sample is not None:
                columns = item.first_logprobs
                columns = slice_logprobs(columns, place, place + 1) if columns is not None else None
                token_id = item.first_token_ids[4 * place : 4 * place + 4]
                self._take_tokens(sample, token_id, columns, FinishCode(code))

    def _take_tokens(
        self, sample: SampleState, token_ids: bytes, logprobs: LogprobColumns | None, code: FinishCode
    ) -> None:
        sample.append(token_ids, logprobs)
        owner = sample.owner
        self._book.jobs[owner.job_id].num_generated += len(token_ids) // 4
        if owner.num_logprob_bytes > self._config.max_logprob_bytes:
            text = f"log-probabilities above scheduler.max_logprob_bytes ({self._config.max_logprob_bytes}); ask fewer"
            request_id = owner.request.request_id
            self._book.fail(
                owner,
                RequestFailure(request_id=request_id, index=sample.index, kind="logprobs_too_large", text=text),
            )
        elif code is FinishCode.PREEMPTED:
            self._book.totals.num_preempted += 1
            self._book.replay(sample, sample.trip.num_attempts)
        elif code is not FinishCode.NONE:
            self._book.finish(sample, code)
        elif owner.request.stream:
            self._book.jobs[owner.job_id].unsent[sample.index] = sample
