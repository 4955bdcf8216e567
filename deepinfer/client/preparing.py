"""Makes wire requests out of rows, and refuses rows that no rank could answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from deepinfer.client.answer_grammar import answer_grammar
from deepinfer.codec import pack
from deepinfer.errors import RequestError, invalid_value, shown
from deepinfer.outputs import Row
from deepinfer.protocol import OutputFormat, Request, SamplingParams
from deepinfer.scheduler.sampling_params import check_sampling
from deepinfer.tokenizer import EncodedChat, Tokenizer, encode_chat

# One log-probability on the wire: token id and value.
_LOGPROB_BYTES = 8
# Characters of a row's name that travel with its request.
_MAX_LABEL = 200


@dataclass(slots=True, frozen=True)
class PreparedRow:
    """A row ready to be sent. `chat` is what reading its answer needs, None for a plain prompt."""

    row: Row
    request: Request
    prompt_token_ids: list[int]
    chat: EncodedChat | None


class RequestMaker:
    """Encodes and checks rows for one engine. Stateless, so any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int, max_logprob_bytes: int) -> None:
        """`max_model_len` bounds prompt + output; `max_logprob_bytes` what one request may answer in logprobs."""
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_logprob_bytes = max_logprob_bytes

    def prepare(self, row: Row, request_id: str, *, stream: bool = False) -> PreparedRow:
        """Return the request of `row`; raises RequestError with the field at fault."""
        params = check_sampling(row.params, vocab_size=self._vocab_size, max_logprobs=None)
        chat = self._encode_chat(row) if row.messages is not None else None
        ids = self._prompt_ids(row.prompt) if chat is None else chat.token_ids
        params = self._bounded(params, len(ids))
        self._check_logprobs(params, len(ids))
        grammar = answer_grammar(row, chat)
        request = Request(
            request_id=request_id,
            prompt_token_ids=pack(ids),
            num_prompt_tokens=len(ids),
            sampling=msgspec.structs.replace(params, so_args=None),
            grammar=grammar,
            num_samples=params.n,
            output_format=OutputFormat() if chat is None else chat.output_format,
            stream=stream,
            label=row.label[:_MAX_LABEL],
        )
        return PreparedRow(row, request, ids, chat)

    def _encode_chat(self, row: Row) -> EncodedChat:
        if row.prompt is not None:
            raise RequestError("give either a prompt or messages, not both", code="invalid_value", param="messages")
        return encode_chat(
            self.tokenizer,
            row.messages,
            thinking=row.chat.thinking,
            reasoning_effort=row.chat.reasoning_effort,
            tools=row.chat.tools,
            tool_choice=row.chat.tool_choice,
            response_format=row.chat.response_format,
        )

    def _prompt_ids(self, prompt: str | list[int] | None) -> list[int]:
        if isinstance(prompt, str):
            return [self.tokenizer.bos_token_id, *self.tokenizer.encode_text(prompt)]
        if not isinstance(prompt, list | tuple) or not prompt:
            raise invalid_value("prompt", f"must be a text or a list of at least one token id, not {shown(prompt)}")
        for place, token_id in enumerate(prompt):
            if not _is_token(token_id, self._vocab_size):
                raise invalid_value(
                    f"prompt[{place}]", f"must be a token id from 0 to {self._vocab_size - 1}, not {shown(token_id)}"
                )
        return list(prompt)

    def _bounded(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Return `params` with `max_tokens` cut to the context; the answer then ends with reason "length"."""
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens and the context is {self._max_model_len} tokens long; "
                f"at least one must be left for the answer",
                code="context_length_exceeded",
                param="prompt",
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens: {params.min_tokens} do not fit behind a prompt of {num_prompt_tokens} tokens into the "
                f"context of {self._max_model_len}; use at most {room}",
                code="context_length_exceeded",
                param="min_tokens",
            )
        return msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))

    def _check_logprobs(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        def entries(number: int | None) -> int:
            if number is None:
                return 0
            return 1 + (self._vocab_size if number == -1 else number)

        num_output = entries(params.logprobs) * params.max_tokens * params.n
        num_bytes = _LOGPROB_BYTES * (num_output + entries(params.prompt_logprobs) * num_prompt_tokens)
        if num_bytes > self._max_logprob_bytes:
            raise invalid_value(
                "logprobs",
                f"may take {num_bytes} bytes for this request, {self._max_logprob_bytes} are allowed "
                "(scheduler.max_logprob_bytes); ask for fewer alternatives, samples or tokens",
            )


def _is_token(token_id: Any, vocab_size: int) -> bool:
    return isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < vocab_size
