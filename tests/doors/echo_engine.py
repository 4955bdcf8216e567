"""An engine without a model: answers are a pure function of the row, results come back out of order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from deepinfer.errors import RequestError
from deepinfer.outputs import CompletionOutput, RequestOutput, Row, RowResult

MAX_PROMPT_TOKENS = 64
MAX_OPEN = 8


class EchoTexts:
    """Token id = code point of one character."""

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class EchoEngine:
    """Answers a prompt with its text reversed; a prompt of more than `MAX_PROMPT_TOKENS` characters is refused.

    Rows are pulled in a thread of their own, at most `MAX_OPEN` of them open, as the real engine does.
    """

    def __init__(self, *, delay_seconds: float = 0.0, seed: int = 0, fail_first_try: str = "\0") -> None:
        self.rows: list[Row] = []
        self._delay_seconds = delay_seconds
        self._random = random.Random(seed)
        self._fail_first_try = fail_first_try

    def __enter__(self) -> EchoEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run_rows(self, rows: Iterable[Row], *, on_tokens: Callable[[int], None]) -> Iterator[RowResult]:
        source, waiting = iter(rows), list[Row]()
        while True:
            puller = threading.Thread(target=self._pull, args=(source, waiting))
            puller.start()
            puller.join()
            if not waiting:
                return
            time.sleep(self._delay_seconds)
            result = self._answer(waiting.pop(self._random.randrange(len(waiting))))
            on_tokens(sum(len(output.token_ids) for output in result.output.outputs))
            yield result

    def _pull(self, source: Iterator[Row], waiting: list[Row]) -> None:
        while len(waiting) < MAX_OPEN and (row := next(source, None)) is not None:
            self.rows.append(row)
            waiting.append(row)

    def _answer(self, row: Row) -> RowResult:
        text = prompt_text(row)
        if len(text) > MAX_PROMPT_TOKENS:
            message = f"prompt: {len(text)} tokens are more than the context of {MAX_PROMPT_TOKENS}"
            error = RequestError(message, code="context_length_exceeded", param="prompt")
            return RowResult(row.tag, RequestOutput(f"r{row.tag}", error=error))
        if self._fail_first_try in text:
            return RowResult(row.tag, RequestOutput(f"r{row.tag}", error=RequestError("try again", code="lost")))
        answer = text[::-1][: row.params.max_tokens]
        outputs = [
            CompletionOutput(index, text=answer, token_ids=[ord(c) for c in answer], finish_reason="stop")
            for index in range(row.params.n)
        ]
        output = RequestOutput(f"r{row.tag}", prompt_token_ids=[ord(c) for c in text], outputs=outputs, seed=7)
        return RowResult(row.tag, output, seconds=0.5, prefill_rank=0, decode_rank=1)


def prompt_text(row: Row) -> str:
    """The text a row asks about."""
    if row.messages is not None:
        return "".join(str(message["content"]) for message in row.messages)
    return row.prompt if isinstance(row.prompt, str) else "".join(map(chr, row.prompt or []))
