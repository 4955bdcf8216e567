"""Results on their way out: filled by the step thread, emptied into one message by the control side."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer.codec import pack, pack_codes
from deepinfer.protocol import (
    DecodeResult,
    FinishCode,
    KVHandle,
    LogprobColumns,
    PrefilledRequest,
    PrefillResult,
    RankLoad,
    RequestFailure,
)
from deepinfer.runtime.kv_transfer import Buffer
from deepinfer.scheduler.logprob_columns import join_logprobs
from deepinfer.scheduler.step_results import Decoded, Prefilled


class PrefillOutbox:
    """Finished prompts with their KV."""

    def __init__(self, rank: int) -> None:
        """Start empty."""
        self._rank = rank
        self._lock = threading.Lock()
        self._items: list[PrefilledRequest] = []
        self._buffers: list[Buffer] = []
        self._failures: list[RequestFailure] = []

    def add(self, prefilled: Prefilled, handle: KVHandle | None = None, buffer: Buffer | None = None) -> None:
        """Leave a finished prompt; no `handle`: nothing is handed over; no `buffer`: it lies at the handle's place."""
        request = prefilled.request
        item = PrefilledRequest(
            request_id=request.request_id,
            index=request.index,
            first_token_ids=pack(prefilled.first_token_ids),
            finish_codes=pack_codes(prefilled.finish_codes),
            first_logprobs=prefilled.first_logprobs,
            prompt_logprobs=prefilled.prompt_logprobs,
            kv=handle,
        )
        with self._lock:
            self._items.append(item)
            if buffer is not None:
                self._buffers.append(buffer)

    def add_failures(self, failures: Iterable[RequestFailure]) -> None:
        """Leave requests that failed."""
        with self._lock:
            self._failures.extend(failures)

    def take(self, load: RankLoad) -> tuple[PrefillResult | None, list[Buffer]]:
        """Return everything since the last call, None if nothing is new, and the buffers of items whose kv has one."""
        with self._lock:
            items, self._items = self._items, []
            buffers, self._buffers = self._buffers, []
            failures, self._failures = self._failures, []
        if not items and not failures:
            return None, []
        result = PrefillResult(rank=self._rank, items=tuple(items), failures=tuple(failures), load=load)
        return result, buffers


@dataclass(slots=True)
class _News:
    """What one sequence gained since the last message."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishCode = FinishCode.NONE
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: list[LogprobColumns] = field(default_factory=list)


class DecodeOutbox:
    """Tokens by sequence. A sequence stands once in a message, however many steps it gathered."""

    def __init__(self, rank: int) -> None:
        """Start empty."""
        self._rank = rank
        self._lock = threading.Lock()
        self._news: dict[int, _News] = {}
        self._failures: list[RequestFailure] = []

    def add(self, decoded: Iterable[Decoded]) -> None:
        """Leave what sequences gained in a step."""
        with self._lock:
            for item in decoded:
                news = self._news.setdefault(item.index, _News())
                news.token_ids.extend(item.token_ids)
                news.finish = item.finish
                news.num_drafted += item.num_drafted
                news.num_accepted += item.num_accepted
                if item.logprobs is not None:
                    news.logprobs.append(item.logprobs)

    def add_failures(self, failures: Iterable[RequestFailure]) -> None:
        """Leave sequences that failed; each failure carries its sequence's index."""
        with self._lock:
            self._failures.extend(failures)

    def take(self, load: RankLoad) -> tuple[DecodeResult | None, list[Buffer]]:
        """Return everything since the last call; None if nothing is new."""
        with self._lock:
            news, self._news = self._news, {}
            failures, self._failures = self._failures, []
        if not news and not failures:
            return None, []
        items = list(news.values())
        with_logprobs = [place for place, item in enumerate(items) if item.logprobs]
        result = DecodeResult(
            rank=self._rank,
            step_id=load.step_id,
            sequence_indexes=pack(list(news)),
            num_tokens=pack([len(item.token_ids) for item in items]),
            token_ids=pack([token_id for item in items for token_id in item.token_ids]),
            finish_codes=pack_codes([item.finish for item in items]),
            num_drafted=pack([item.num_drafted for item in items]),
            num_accepted=pack([item.num_accepted for item in items]),
            logprob_sequences=pack(with_logprobs),
            logprobs=tuple(join_logprobs(items[place].logprobs) for place in with_logprobs),
            failures=tuple(failures),
            load=load,
        )
        return result, []
