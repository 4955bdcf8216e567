"""Output lines: OpenAI's chat.completion and text_completion objects, or a row's error. Strict JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from deepinfer.batch_file.fields import CHAT, Endpoint
from deepinfer.batch_file.local_output import output_id
from deepinfer.errors import RequestError
from deepinfer.outputs import CompletionOutput, RowResult, ToolCall

# JSON has no infinity: a token that a mask has ruled out gets this, as in OpenAI's and vLLM's answers.
LOWEST_LOGPROB = -9999.0


class TokenTexts(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def token_text(self, token_id: int) -> str:
        """Return one token for display."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's raw bytes."""
        ...


def error_line(job_id: str, line: int, custom_id: str | None, error: RequestError) -> bytes:
    """Return the output line of a failed row."""
    fields = {"code": error.code, "message": str(error), "param": error.param, "line": line}
    return _encode(
        {"id": output_id(job_id, line), "custom_id": _utf8(custom_id), "response": None, "error": _utf8(fields)}
    )


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """What a row's output line needs from its input line. `num_logprobs` is the one of its sampling parameters."""

    custom_id: str
    endpoint: Endpoint
    num_logprobs: int | None


class AnswerWriter:
    """Makes the output lines of answered rows of one job."""

    def __init__(self, job_id: str, model: str, texts: TokenTexts) -> None:
        self._job_id = job_id
        self._model = model
        self._texts = texts

    def line(self, row: AnsweredRow, result: RowResult, created: int) -> bytes:
        """Return the output line of `result`; `created` is in seconds since 1970."""
        is_chat = row.endpoint == CHAT
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._job_id}-{result.tag}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": created,
            "model": self._model,
            "choices": [
                self._chat_choice(output, row.num_logprobs) if is_chat else self._completion_choice(output)
                for output in result.output.outputs
            ],
            "usage": _usage(result),
            "deepinfer": _own_figures(result),
        }
        response = {"status_code": 200, "request_id": result.output.request_id, "body": body}
        return _encode(
            {"id": output_id(self._job_id, result.tag), "custom_id": row.custom_id, "response": response, "error": None}
        )

    def _chat_choice(self, output: CompletionOutput, num_logprobs: int | None) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": _utf8(output.text),
            "reasoning_content": _utf8(output.reasoning),
        }
        if output.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in output.tool_calls]
        logprobs = None
        if output.logprobs is not None:
            logprobs = {"content": [self._chat_logprob(entries, num_logprobs or 0) for entries in output.logprobs]}
        return {
            "index": output.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def _chat_logprob(self, entries: dict[int, float], num_top: int) -> dict[str, Any]:
        """Return the chosen token's entry, with the `num_top` most likely ones (-1: all), ties by ascending id."""
        chosen = next(iter(entries))
        ranked = sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))
        top = ranked if num_top < 0 else ranked[:num_top]
        return self._token(chosen, entries[chosen]) | {"top_logprobs": [self._token(*entry) for entry in top]}

    def _token(self, token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": self._texts.token_text(token_id),
            "logprob": _finite(value),
            "bytes": list(self._texts.token_bytes(token_id)),
        }

    def _completion_choice(self, output: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._completion_logprobs(output.logprobs)
        return {
            "index": output.index,
            "text": _utf8(output.text),
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def _completion_logprobs(self, rows: Sequence[dict[int, float]]) -> dict[str, Any]:
        tokens, values, top, offsets, offset = [], [], [], [], 0
        for entries in rows:
            chosen = next(iter(entries))
            text = self._texts.token_text(chosen)
            tokens.append(text)
            values.append(_finite(entries[chosen]))
            alternatives: dict[str, float] = {}
            for token_id, value in entries.items():  # two ids of one text: the first, which is the likelier, stays
                alternatives.setdefault(self._texts.token_text(token_id), _finite(value))
            top.append(alternatives)
            offsets.append(offset)
            offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": _utf8(call.name), "arguments": _utf8(call.arguments)},
    }


def _usage(result: RowResult) -> dict[str, Any]:
    num_prompt = len(result.output.prompt_token_ids)
    num_generated = sum(len(output.token_ids) for output in result.output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "completion_tokens_details": {
            "reasoning_tokens": sum(output.num_reasoning_tokens for output in result.output.outputs)
        },
        "prompt_tokens_details": {"cached_tokens": result.output.num_cached_tokens},
    }


def _own_figures(result: RowResult) -> dict[str, Any]:
    return {
        "num_drafted_tokens": result.output.num_drafted_tokens,
        "num_accepted_tokens": result.output.num_accepted_tokens,
        "prefill_rank": result.prefill_rank,
        "decode_rank": result.decode_rank,
        "seconds": round(result.seconds, 6),
        "seed": result.output.seed,
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST_LOGPROB


def _utf8(value: Any) -> Any:
    """Return `value` with lone surrogates in its strings replaced by U+FFFD, so that it has a UTF-8 form."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {name: _utf8(item) for name, item in value.items()}
    return value


def _encode(line: dict[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"
