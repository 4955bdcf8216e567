"""One run of rows: pulled lazily, sent within credits, given back in the order in which they finish.

A feeder thread pulls and encodes rows, so that a slow source never holds back answers; the caller's thread fetches
them. A row holds a credit from before it is pulled until its result has been handed to the caller: so neither a long
source nor a slow caller makes memory grow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from deepinfer.client.assembling import OpenRequest
from deepinfer.client.connection import EngineClient
from deepinfer.client.preparing import RequestMaker
from deepinfer.errors import RequestError
from deepinfer.log import about, get_logger
from deepinfer.outputs import RequestOutput, Row, RowResult
from deepinfer.protocol import Request
from deepinfer.tokenizer import OutputDelta

# Rows that come in quick succession travel together.
_MAX_BATCH = 32
_BATCH_SECONDS = 0.005
_POLL_SECONDS = 0.5
_LOGGER = get_logger("client")


@dataclass(slots=True, frozen=True)
class RowUpdate:
    """What came of a row: pieces of its text as they become certain, and `result` with the last of them.

    Pieces of several samples are not told apart; only streamed rows, which have one sample, should be read by piece.
    """

    tag: int
    deltas: list[OutputDelta]
    result: RowResult | None


class Run:
    """The rows of one call. Iterate `updates` or `results` once, from one thread, and `close` it in the end."""

    def __init__(
        self,
        client: EngineClient,
        maker: RequestMaker,
        rows: Iterable[Row],
        *,
        max_in_flight: int,
        stream: bool = False,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        """Begin to pull rows at once, at most `max_in_flight` before results are taken.

        `on_tokens` hears how many tokens have been generated since it was last called, from the thread that iterates.
        """
        self._maker = maker
        self._rows = rows
        self._stream = stream
        self._on_tokens = on_tokens
        self._job = client.open_job()
        self._credits = threading.Semaphore(max_in_flight)
        self._changed = threading.Condition()
        self._open: dict[str, OpenRequest] = {}
        self._unsent: list[Request] = []
        self._refused: deque[RowResult] = deque()
        self._source_error: BaseException | None = None
        self._is_fed = False
        self._is_closed = False
        self._last_send = 0.0
        self._feeder = threading.Thread(target=self._feed, name="deepinfer-feeder", daemon=True)
        self._feeder.start()

    def results(self) -> Iterator[RowResult]:
        """Yield every row's result; raises ClusterError when the engine fails, and what the source of rows raised."""
        for update in self.updates():
            if update.result is not None:
                yield update.result

    def updates(self) -> Iterator[RowUpdate]:
        """Yield all that happens; see `results`."""
        try:
            while self._wait_for_work():
                yield from self._take_refused()
                if not self._open:
                    continue
                self._send()
                news = self._job.next_outputs(_POLL_SECONDS)
                if self._on_tokens is not None and news.num_generated:
                    self._on_tokens(news.num_generated)
                for output in news.outputs:
                    request = self._open[output.request_id]
                    result, deltas = request.add(output)
                    if output.error is not None:
                        _log_failure(request.prepared.row, output.request_id, output.error.text)
                    if result is not None:
                        with self._changed:
                            del self._open[output.request_id]
                    yield RowUpdate(request.prepared.row.tag, deltas, result)
                    if result is not None:
                        self._credits.release()
        finally:
            self.close()

    def close(self) -> None:
        """Stop pulling rows and give up those in flight; may be called twice and from any thread."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._credits.release()  # wakes the feeder
        self._job.close()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to fetch or to hand out; False when all rows have been answered."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._open or self._refused or self._is_fed or self._is_closed or self._source_error
            )
            if self._source_error is not None:
                raise self._source_error
            return not self._is_closed and bool(self._open or self._refused or not self._is_fed)

    def _take_refused(self) -> Iterator[RowUpdate]:
        while self._refused:
            result = self._refused.popleft()
            yield RowUpdate(result.tag, [], result)
            self._credits.release()

    def _feed(self) -> None:
        number = 0
        try:
            rows = iter(self._rows)
            while self._take_credit():
                row = next(rows, None)
                if row is None:
                    break
                self._admit(row, f"{self._job.job_id}-{number}")
                number += 1
        except BaseException as error:
            self._source_error = error
        self._send()
        with self._changed:
            self._is_fed = True
            self._changed.notify_all()

    def _take_credit(self) -> bool:
        if not self._credits.acquire(blocking=False):
            self._send()
            self._credits.acquire()
        return not self._is_closed

    def _admit(self, row: Row, request_id: str) -> None:
        try:
            prepared = self._maker.prepare(row, request_id, stream=self._stream)
        except RequestError as error:
            _log_failure(row, request_id, str(error))
            output = RequestOutput(request_id=request_id, error=error)
            output.prompt = row.prompt if isinstance(row.prompt, str) else None
            with self._changed:
                self._refused.append(RowResult(tag=row.tag, output=output))
                self._changed.notify_all()
            return
        opened = OpenRequest(prepared, self._maker.tokenizer)
        with self._changed:
            self._open[request_id] = opened
            self._unsent.append(prepared.request)
            self._changed.notify_all()
            is_due = len(self._unsent) >= _MAX_BATCH or time.monotonic() - self._last_send > _BATCH_SECONDS
        if is_due:
            self._send()

    def _send(self) -> None:
        with self._changed:
            requests, self._unsent = self._unsent, []
            self._last_send = time.monotonic()
        if requests:
            self._job.submit(requests)


def _log_failure(row: Row, request_id: str, text: str) -> None:
    """For whoever asks with debug logs; the error itself goes to the caller."""
    _LOGGER.debug("failed: %s", text, extra=about(request=request_id, row=row.label or str(row.tag)))
