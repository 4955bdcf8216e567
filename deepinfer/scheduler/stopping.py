"""When a sequence ends: end-of-sequence and stop ids, stop strings, and the two length limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from deepinfer.protocol import FinishCode, SamplingParams
from deepinfer.scheduler.sampling_params import stop_ids
from deepinfer.scheduler.step_plan import Int32Array


class ParsedPiece(Protocol):
    """What reading one token gave: `stopped` once a stop string is complete."""

    @property
    def stopped(self) -> bool: ...


class StopStringReader(Protocol):
    """The part of `tokenizer.OutputParser` that finds stop strings: it reads a sequence's output token by token.

    It alone decides which text counts (content, not reasoning or tool markup), so that a rank and a client, who read
    the same tokens with the same class, cut at the same token.
    """

    def push(self, token_id: int) -> ParsedPiece: ...


class StopDecision(NamedTuple):
    """Of a run of tokens the first `num_kept` belong to the sequence; it ends with the last of them unless NONE."""

    num_kept: int
    code: FinishCode


class StopChecker:
    """Decides the end of one sequence from its committed tokens.

    STOP: the end-of-sequence id (unless `ignore_eos`) or one of `stop_token_ids`, with at least `min_tokens` output
    tokens before it; or the token that completes a stop string. LENGTH: `max_tokens` output tokens, or `max_model_len`
    tokens in all. STOP wins where both hold. The token that ends a sequence stays among its token ids, counts in its
    usage and has its log-probability; text leaves it out.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        eos_token_id: int,
        num_prompt_tokens: int,
        max_model_len: int,
        output_token_ids: Sequence[int] = (),
        build_reader: Callable[[], StopStringReader] | None = None,
    ) -> None:
        """`output_token_ids`: output known from before a replay, which did not end the sequence.

        `build_reader` is needed, and called, only when there are stop strings.
        """
        self._stop_ids = frozenset(stop_ids(params, eos_token_id))
        self._min_tokens = params.min_tokens
        self._max_output = min(params.max_tokens, max_model_len - num_prompt_tokens)
        self._num_output = len(output_token_ids)
        assert self._num_output < self._max_output, (self._num_output, self._max_output)
        self._reader: StopStringReader | None = None
        if params.stop:
            assert build_reader is not None, "stop strings need a reader"
            self._reader = build_reader()
            for token_id in output_token_ids:
                self._reader.push(token_id)
        self._finished = False

    def check(self, token_ids: Sequence[int] | Int32Array) -> StopDecision:
        """Take the next committed tokens, in order; an ending inside the run cuts it. Not to be called afterwards."""
        assert not self._finished, "the sequence has ended"
        for num_kept, token_id in enumerate(token_ids, start=1):
            code = self._check_token(int(token_id))
            if code is not FinishCode.NONE:
                self._finished = True
                return StopDecision(num_kept, code)
        return StopDecision(len(token_ids), FinishCode.NONE)

    def _check_token(self, token_id: int) -> FinishCode:
        self._num_output += 1
        if self._num_output > self._min_tokens and token_id in self._stop_ids:
            return FinishCode.STOP
        if self._reader is not None and self._reader.push(token_id).stopped:
            return FinishCode.STOP
        return FinishCode.LENGTH if self._num_output >= self._max_output else FinishCode.NONE
