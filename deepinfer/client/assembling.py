"""Puts an answer together from what the driver sends: token ids to text, packed log-probabilities to dicts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer.client.preparing import PreparedRow
from deepinfer.codec import unpack, unpack_floats
from deepinfer.errors import RequestError
from deepinfer.outputs import CompletionOutput, ReasonName, RequestOutput, RowResult, ToolCall
from deepinfer.protocol import FinishCode, LogprobColumns
from deepinfer.protocol import RequestOutput as WireOutput
from deepinfer.tokenizer import OutputDelta, OutputParser, Tokenizer

_REASONS: dict[FinishCode, ReasonName] = {
    FinishCode.STOP: "stop",
    FinishCode.GRAMMAR_END: "stop",
    FinishCode.LENGTH: "length",
    FinishCode.ABORT: "abort",
    FinishCode.ERROR: "error",
}


@dataclass(slots=True)
class _Sample:
    """One of the answers while its tokens arrive."""

    parser: OutputParser
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobColumns] = field(default_factory=list)
    output: CompletionOutput | None = None


class OpenRequest:
    """A request in flight. Feed it every wire output of its id; it has a result once all samples have ended."""

    def __init__(self, prepared: PreparedRow, tokenizer: Tokenizer) -> None:
        """Begin the row's clock."""
        self.prepared = prepared
        self._tokenizer = tokenizer
        self._begin = time.monotonic()
        self._samples = [_Sample(self._parser()) for _ in range(prepared.request.num_samples)]
        self._output = _empty_output(prepared)
        self._ranks = (-1, -1)

    def add(self, wire: WireOutput) -> tuple[RowResult | None, list[OutputDelta]]:
        """Take over a wire output; returns the result if it was the last one, and the new text pieces in order."""
        self._ranks = (wire.prefill_rank, wire.decode_rank)
        if wire.error is not None:
            error = RequestError(wire.error.text, code=wire.error.kind)
            return self.fail(error), []
        self._output.seed = wire.seed
        self._output.num_cached_tokens = wire.num_cached_tokens
        self._output.num_drafted_tokens += wire.num_drafted
        self._output.num_accepted_tokens += wire.num_accepted
        if wire.prompt_logprobs is not None:
            self._output.prompt_logprobs = _as_dicts([wire.prompt_logprobs])
        sample = self._samples[wire.sample]
        assert wire.first_position == len(sample.token_ids), "an output of this sample is missing or came twice"
        deltas = self._extend(sample, wire)
        if any(other.output is None for other in self._samples):
            return None, deltas
        self._output.outputs = [other.output for other in self._samples if other.output is not None]
        return self._result(), deltas

    def fail(self, error: RequestError) -> RowResult:
        """Return the result of a request that failed."""
        self._output = _empty_output(self.prepared)
        self._output.error = error
        return self._result()

    def _extend(self, sample: _Sample, wire: WireOutput) -> list[OutputDelta]:
        new_ids: list[int] = unpack(wire.token_ids).tolist()
        sample.token_ids += new_ids
        sample.logprobs += wire.logprobs
        shown = new_ids[:-1] if self._ended_by_id(wire.finish, new_ids) else new_ids
        deltas = [sample.parser.push(token_id) for token_id in shown]
        if wire.finish is not FinishCode.NONE:
            last_delta = self._finish(wire.sample, sample, wire.finish)
            deltas.append(last_delta)
        return deltas

    def _finish(self, index: int, sample: _Sample, finish: FinishCode) -> OutputDelta:
        parsed = sample.parser.finish(_REASONS[finish])
        request_id = self.prepared.request.request_id
        sample.output = CompletionOutput(
            index=index,
            text=parsed.content,
            token_ids=sample.token_ids,
            logprobs=None if self.prepared.request.sampling.logprobs is None else _output_dicts(sample.logprobs),
            finish_reason="tool_calls" if parsed.finish_reason == "tool_calls" else _REASONS[finish],
            reasoning=parsed.reasoning or None,
            tool_calls=[
                ToolCall(call_id=f"call-{request_id}-{index}-{place}", name=call.name, arguments=call.arguments)
                for place, call in enumerate(parsed.tool_calls)
            ],
            num_reasoning_tokens=parsed.num_reasoning_tokens,
        )
        return parsed.last_delta

    def _ended_by_id(self, finish: FinishCode, new_ids: list[int]) -> bool:
        """True when the last token ended the answer by its id; such a token is no part of the text."""
        params = self.prepared.request.sampling
        if finish is not FinishCode.STOP or not new_ids:
            return False
        is_eos = new_ids[-1] == self._tokenizer.eos_token_id and not params.ignore_eos
        return is_eos or new_ids[-1] in params.stop_token_ids

    def _parser(self) -> OutputParser:
        params = self.prepared.request.sampling
        chat = self.prepared.chat
        return OutputParser(
            self._tokenizer,
            self.prepared.request.output_format,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
            tools=None if chat is None else chat.tools,
        )

    def _result(self) -> RowResult:
        prefill_rank, decode_rank = self._ranks
        return RowResult(
            tag=self.prepared.row.tag,
            output=self._output,
            seconds=time.monotonic() - self._begin,
            prefill_rank=prefill_rank,
            decode_rank=decode_rank,
        )


def _empty_output(prepared: PreparedRow) -> RequestOutput:
    prompt = prepared.row.prompt
    if prepared.chat is not None:
        prompt = prepared.chat.text
    return RequestOutput(
        request_id=prepared.request.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=prepared.prompt_token_ids,
    )


def _output_dicts(columns: Sequence[LogprobColumns]) -> list[dict[int, float]]:
    return [entry or {} for entry in _as_dicts(columns)]


def _as_dicts(columns: Sequence[LogprobColumns]) -> list[dict[int, float] | None]:
    """Return one dict for each token, its own token first; None for a token without entries."""
    dicts: list[dict[int, float] | None] = []
    for column in columns:
        ids, values = unpack(column.token_ids).tolist(), unpack_floats(column.values).tolist()
        begin = 0
        for count in unpack(column.counts).tolist():
            end = begin + count
            dicts.append(dict(zip(ids[begin:end], values[begin:end], strict=True)) if count else None)
            begin = end
    return dicts
