"""Made-up requests: prompts of random tokens, and decode admissions that hand over nothing."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from deepinfer.codec import pack
from deepinfer.protocol import AdmittedRequest, DecodeBatch, KVHandle, PrefillBatch, Request, SamplingParams

_SEED = 1


def decode_batch(
    num_requests: int, *, num_tokens: int, max_tokens: int, vocab_size: int, layout_digest: str
) -> DecodeBatch:
    """Return sequences of `num_tokens` tokens, the first drawn one included, that go on for `max_tokens` at most."""
    admitted = tuple(
        AdmittedRequest(
            request=request,
            sample_offsets=pack(np.zeros(1, np.int32)),
            first_token_ids=pack(np.full(1, vocab_size // 2, np.int32)),
            kv=empty_handover(request, layout_digest),
        )
        for request in made_up_requests(num_requests, num_tokens - 1, max_tokens, vocab_size)
    )
    return DecodeBatch(batch_id=1, wake_id=1, admitted=admitted)


def prefill_batch(num_requests: int, *, num_tokens: int, vocab_size: int) -> PrefillBatch:
    """Return prompts of `num_tokens` tokens that end with their first token, so that nothing is handed over."""
    return PrefillBatch(
        batch_id=1, wake_id=1, requests=tuple(made_up_requests(num_requests, num_tokens, 1, vocab_size))
    )


def made_up_requests(count: int, num_tokens: int, max_tokens: int, vocab_size: int) -> Iterator[Request]:
    """Yield prompts of `num_tokens` random tokens that ask for `max_tokens`, whatever they are."""
    draw = np.random.default_rng(_SEED)
    for index in range(count):
        yield Request(
            request_id=f"bench-{index}",
            prompt_token_ids=pack(draw.integers(0, vocab_size, num_tokens, np.int32)),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seq_seed=index),
            index=index,
        )


def empty_handover(request: Request, layout_digest: str) -> KVHandle:
    """Return the handle of a buffer with nothing in it."""
    return KVHandle(
        request_id=request.request_id,
        source_rank=0,
        num_tokens=request.num_prompt_tokens,
        layout_digest=layout_digest,
        groups=(),
        nbytes=0,
        checksum=zlib.crc32(b""),
    )
