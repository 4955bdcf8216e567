"""The driver's view of unfinished requests: what they have produced, and where their sequences are."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from deepinfer.codec import unpack
from deepinfer.protocol import AdmittedRequest, FinishCode, LogprobColumns, Request, RequestFailure, RequestOutput
from deepinfer.scheduler.piece_book import RankPiece


class Phase(enum.Enum):
    """Where a trip is. `PREFILLED`: its KV lies in a buffer and waits to be sent to its decode rank."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    DECODING = "decoding"
    OVER = "over"


@dataclass(slots=True, eq=False)
class RequestState:
    """A user's request until all its samples have ended.

    `open_indexes`: sequences that have not. `turn`: its place among requests of equal priority, also when replayed.
    """

    job_id: str
    request: Request
    open_indexes: set[int]
    turn: int
    prompt_logprobs: LogprobColumns | None = None
    num_cached_tokens: int = 0
    num_logprob_bytes: int = 0

    def add_prompt_logprobs(self, logprobs: LogprobColumns) -> None:
        """Keep the prompt's log-probabilities; a replay brings them again and changes nothing."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = logprobs
            self.num_logprob_bytes += num_column_bytes(logprobs)


@dataclass(slots=True, eq=False)
class Trip:
    """One way of one or more sequences through a prefill rank and a decode rank; a replay is a new trip.

    `blocks_per_sequence`: blocks reserved on the decode rank for each sequence, in the balancer's order of groups.
    `kv_bytes`: what its hand-over counts for; 0 before the start and after the decode rank has taken it in.
    `num_unsettled`: sequences of which the decode rank has not reported anything yet. Between its two ranks its KV is
    in `buffer`, or in a `piece` of its prefill rank's memory.
    """

    request: Request
    num_attempts: int
    phase: Phase = Phase.WAITING
    prefill_rank: int = -1
    decode_rank: int = -1
    blocks_per_sequence: tuple[int, ...] = ()
    kv_bytes: int = 0
    num_unsettled: int = 0
    admitted: AdmittedRequest | None = None
    buffer: object = None
    piece: RankPiece | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the prefill rank runs."""
        return (len(self.request.prompt_token_ids) + len(self.request.output_token_ids)) // 4


@dataclass(slots=True, eq=False)
class SampleState:
    """One sequence of a request: its output so far (an int32 column) is all that a replay needs."""

    index: int
    sample: int
    owner: RequestState
    trip: Trip
    token_ids: bytearray = field(default_factory=bytearray)
    logprobs: list[LogprobColumns] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_sent_bytes: int = 0
    has_sent: bool = False
    is_settled: bool = False

    def append(self, token_ids: bytes, logprobs: LogprobColumns | None) -> None:
        """Take over new tokens (an int32 column) and what belongs to them."""
        self.token_ids += token_ids
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.owner.num_logprob_bytes += num_column_bytes(logprobs)

    def replay_request(self) -> Request:
        """Return the request that continues this sequence from its prompt and output."""
        return msgspec.structs.replace(
            self.owner.request,
            index=self.index,
            first_sample=self.sample,
            num_samples=1,
            output_token_ids=bytes(self.token_ids),
        )

    def take_output(self, finish: FinishCode) -> RequestOutput:
        """Return what was not sent yet. Draft counts come with the last message only, so they can be summed."""
        is_last = finish is not FinishCode.NONE
        output = RequestOutput(
            request_id=self.owner.request.request_id,
            sample=self.sample,
            first_position=self.num_sent_bytes // 4,
            token_ids=bytes(self.token_ids[self.num_sent_bytes :]),
            finish=finish,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=self.owner.prompt_logprobs if self.sample == 0 and not self.has_sent else None,
            num_cached_tokens=self.owner.num_cached_tokens,
            num_drafted=self.num_drafted if is_last else 0,
            num_accepted=self.num_accepted if is_last else 0,
            prefill_rank=self.trip.prefill_rank,
            decode_rank=self.trip.decode_rank,
            seed=self.owner.request.sampling.seq_seed or 0,
        )
        self.num_sent_bytes = len(self.token_ids)
        self.logprobs.clear()
        self.has_sent = True
        return output


@dataclass(slots=True, eq=False)
class Job:
    """One client: unfinished requests by id, outputs not fetched yet, sequences with streamed tokens not sent yet.

    `next_turn`: the turn of its next request; see `RequestBook.add`. `num_generated`: tokens since its client last
    asked.
    """

    next_turn: int = 0
    num_generated: int = 0
    requests: dict[str, RequestState] = field(default_factory=dict)
    outputs: list[RequestOutput] = field(default_factory=list)
    unsent: dict[int, SampleState] = field(default_factory=dict)


def num_column_bytes(logprobs: LogprobColumns) -> int:
    """Return the size of packed log-probabilities."""
    return len(logprobs.counts) + len(logprobs.token_ids) + len(logprobs.values)


def failed_handover(admitted: AdmittedRequest, *, kind: str, text: str) -> list[RequestFailure]:
    """Return one failure for each sequence of a hand-over that went wrong; a new prefill can make them good."""
    request = admitted.request
    return [
        RequestFailure(
            request_id=request.request_id, index=request.index + offset, kind=kind, text=text, retryable=True
        )
        for offset in unpack(admitted.sample_offsets).tolist()
    ]


def error_output(request: Request, failure: RequestFailure) -> RequestOutput:
    """Return the one message that says a request has failed, whatever was sent of it before."""
    return RequestOutput(
        request_id=request.request_id,
        finish=FinishCode.ERROR,
        seed=request.sampling.seq_seed or 0,
        error=failure,
    )
