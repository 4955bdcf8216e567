"""Answers down to the bits of their log-probabilities, through rank engines of the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from support.processes import RankPlace
from support.rank_engines import Answer, RunningEngine, admission, replay, run_decode, run_prefill, wait_until_parked

from deepinfer.codec import unpack, unpack_codes
from deepinfer.protocol import FinishCode, LogprobColumns, Request
from deepinfer.runtime.rank_engine import RankEngine
from deepinfer.scheduler.logprob_columns import join_logprobs


@dataclass(frozen=True)
class Bits:
    """What one request with one sample came to: every token with its alternatives, values as float32 bytes.

    `prompt_logprobs`: one entry, or one for each time that the prompt ran when these differ.
    """

    token_ids: tuple[int, ...]
    finish: FinishCode
    logprob_ids: bytes
    logprob_values: bytes
    prompt_logprobs: frozenset[LogprobColumns | None]


def answer_bits(
    prefill: RankEngine, decode: RankEngine, requests: Sequence[Request], *, place: RankPlace | None = None
) -> tuple[dict[int, Bits], int]:
    """Answer requests of one sample each on this process's two ranks; also return how often one was preempted.

    With `place` this is one rank of several, which all call this; none of them may preempt.
    """
    answers = {request.index: Answer() for request in requests}
    prompts: dict[int, set[LogprobColumns | None]] = {request.index: set() for request in requests}
    origins = {request.index: request for request in requests}
    with RunningEngine(prefill) as prefilling, RunningEngine(decode) as decoding:
        batch, wake_id, is_first = list(requests), 0, True
        while batch or is_first:
            wake_id, is_first = wake_id + 1, False
            preempted = _answer_once(prefilling, decoding, batch, answers, prompts, wake_id)
            batch = [replay(origins[index], 0, answers[index]) for index in preempted]
        if place is not None:
            wait_until_parked(prefilling)
            wait_until_parked(decoding)
            place.wait_for_all("answered")  # a rank that has finished helps the others until then
    num_preemptions = sum(answer.num_preemptions for answer in answers.values())
    return {index: _bits(answer, prompts[index]) for index, answer in answers.items()}, num_preemptions


def _answer_once(
    prefilling: RunningEngine,
    decoding: RunningEngine,
    batch: Sequence[Request],
    answers: dict[int, Answer],
    prompts: dict[int, set[LogprobColumns | None]],
    wake_id: int,
) -> list[int]:
    done, failures = run_prefill(prefilling, batch, wake_id=wake_id)
    assert not failures, failures
    admitted = []
    for request in batch:
        item, buffer = done[request.index]
        answer = answers[request.index]
        answer.token_ids += unpack(item.first_token_ids).tolist()
        answer.finish = FinishCode(unpack_codes(item.finish_codes)[0])
        answer.logprobs.append(item.first_logprobs)
        prompts[request.index].add(item.prompt_logprobs)
        if buffer is not None:
            admitted.append((admission(request, item), buffer))
    return run_decode(decoding, admitted, answers, wake_id=wake_id)


def _bits(answer: Answer, prompt_logprobs: set[LogprobColumns | None]) -> Bits:
    assert answer.failure is None, answer.failure
    columns = join_logprobs(answer.logprobs)
    assert len(unpack(columns.counts)) == len(answer.token_ids), "every token has its log-probabilities"
    return Bits(tuple(answer.token_ids), answer.finish, columns.token_ids, columns.values, frozenset(prompt_logprobs))
