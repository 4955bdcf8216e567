"""Messages and columns survive the wire; what is no message is refused with its place."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from deepinfer.codec import decode, encode, pack, pack_codes, pack_floats, unpack, unpack_codes, unpack_floats
from deepinfer.protocol import (
    AdmittedRequest,
    DecodeBatch,
    DecodeResult,
    FinishCode,
    KVGroupExtent,
    KVHandle,
    LogprobColumns,
    Message,
    OutputBatch,
    OutputFormat,
    PrefillBatch,
    PrefilledRequest,
    PrefillResult,
    RankLoad,
    RankReady,
    Request,
    RequestBatch,
    RequestFailure,
    RequestOutput,
    SamplingParams,
)

_PARAMS = SamplingParams(max_tokens=3, stop=("a", "b"), logit_bias={7: -1.5}, so_args={"schema": {"x": [1]}})
_REQUEST = Request(
    request_id="r",
    index=4,
    prompt_token_ids=pack([1, 2]),
    num_prompt_tokens=2,
    sampling=_PARAMS,
    output_format=OutputFormat(kind="chat", in_reasoning=True),
)
_HANDLE = KVHandle(
    request_id="r",
    source_rank=1,
    num_tokens=2,
    layout_digest="d",
    groups=(KVGroupExtent(group="g", first_position=0, num_records=2, nbytes=8),),
    nbytes=8,
    checksum=9,
)
_LOGPROBS = LogprobColumns(counts=pack([1]), token_ids=pack([5]), values=pack_floats([-0.5]))
_FAILURE = RequestFailure(request_id="r", index=4, kind="k", text="t", retryable=True)
_LOAD = RankLoad(rank=1, num_free_blocks={"global": 3})

MESSAGES: list[Message] = [
    PrefillBatch(batch_id=1, wake_id=2, requests=(_REQUEST,), aborted_indexes=pack([9])),
    PrefillResult(
        rank=1,
        load=_LOAD,
        failures=(_FAILURE,),
        items=(
            PrefilledRequest(
                request_id="r",
                index=4,
                first_token_ids=pack([5]),
                finish_codes=pack_codes([FinishCode.NONE]),
                first_logprobs=_LOGPROBS,
                kv=_HANDLE,
            ),
        ),
    ),
    DecodeBatch(
        batch_id=1,
        wake_id=3,
        admitted=(AdmittedRequest(request=_REQUEST, sample_offsets=pack([0]), first_token_ids=pack([5]), kv=_HANDLE),),
    ),
    DecodeResult(rank=1, step_id=7, sequence_indexes=pack([4]), token_ids=pack([1]), logprobs=(_LOGPROBS,), load=_LOAD),
    RequestBatch(job_id="j", requests=(_REQUEST,), aborted_ids=("x",)),
    OutputBatch(outputs=(RequestOutput(request_id="r", finish=FinishCode.STOP, error=_FAILURE),), fatal="why"),
    RankReady(
        rank=0,
        role="prefill",
        node="n",
        device="cpu",
        pid=1,
        num_blocks={"global": 5},
        num_slots=2,
        kernel_set={"gate": "reference"},
        model_digest="m",
        layout_digest="l",
        version="0",
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


def test_unknown_field_is_refused_with_its_place() -> None:
    tree = msgspec.msgpack.decode(encode(MESSAGES[1]))
    tree["load"]["surprise"] = 1
    with pytest.raises(msgspec.ValidationError, match=r"unknown field `surprise` - at `\$.load`"):
        decode(msgspec.msgpack.encode(tree))


def test_columns_round_trip() -> None:
    assert unpack(pack([-(2**31), 0, 2**31 - 1])).tolist() == [-(2**31), 0, 2**31 - 1]
    assert unpack(pack(np.array([3, 4], np.int64))).tolist() == [3, 4]
    assert unpack_floats(pack_floats([0.5, -np.inf])).tolist() == [0.5, -np.inf]
    assert unpack_codes(pack_codes([0, 255])).tolist() == [0, 255]
    assert unpack(pack([])).size == 0


def test_what_does_not_fit_a_column_is_refused() -> None:
    with pytest.raises(OverflowError, match="2147483648"):
        pack([2**31])
