"""Which jobs have a living client, which have been closed and why, and the requests that were refused at once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from deepinfer.errors import RequestError
from deepinfer.log import about, get_logger
from deepinfer.protocol import FinishCode, Request, RequestFailure, RequestOutput

# How many closed jobs are remembered, against submissions that arrive after the end of their job.
_MAX_CLOSED_JOBS = 10_000
_LOGGER = get_logger("driver")


class JobDesk:
    """Bookkeeping of jobs beside their requests, which the scheduler holds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without jobs."""
        self._clock = clock
        self._heard_at: dict[str, float] = {}
        self._reasons: dict[str, str] = {}  # of closed jobs
        self._refused: defaultdict[str, list[RequestOutput]] = defaultdict(list)

    @property
    def has_jobs(self) -> bool:
        """True while a job is open."""
        return bool(self._heard_at)

    def hear(self, job_id: str) -> bool:
        """Note that the job's client is alive; False when the job is closed, since calls may overtake each other."""
        if job_id in self._reasons:
            return False
        self._heard_at[job_id] = self._clock()
        return True

    def silent_jobs(self, seconds: float) -> list[str]:
        """Return the jobs whose clients have said nothing for longer than `seconds`."""
        now = self._clock()
        return [job_id for job_id, heard_at in self._heard_at.items() if now - heard_at > seconds]

    def close(self, job_id: str, reason: str) -> None:
        """Forget a job, but for `reason`."""
        self._reasons[job_id] = reason
        self._heard_at.pop(job_id, None)
        self._refused.pop(job_id, None)
        if len(self._reasons) > _MAX_CLOSED_JOBS:
            del self._reasons[next(iter(self._reasons))]

    def why_closed(self, job_id: str) -> str | None:
        """Return why a job was closed, None when it was not."""
        return self._reasons.get(job_id)

    def refuse(self, job_id: str, request: Request, error: RequestError) -> None:
        """Keep the refusal of a request for its job."""
        _LOGGER.debug("refused: %s", error, extra=about(request=request.request_id, row=request.label))
        failure = RequestFailure(request_id=request.request_id, index=-1, kind=error.code, text=str(error))
        output = RequestOutput(request_id=request.request_id, finish=FinishCode.ERROR, error=failure)
        self._refused[job_id].append(output)

    def take_refusals(self, job_id: str) -> tuple[RequestOutput, ...]:
        """Return the job's refusals since the last call."""
        return tuple(self._refused.pop(job_id, ()))
