"""Every message that crosses a process, and the request structs inside them.

Structs that occur once per request carry named fields; what occurs every step travels as packed columns: little-endian
`int32`, `float32` or `uint8` bytes, written and read by `codec.pack` and `codec.unpack`. Tensors never stand inside a
message. Schema rules: a new field has a default, a field never changes its meaning, all processes run one version.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

Role = Literal["prefill", "decode"]


class FinishCode(enum.IntEnum):
    """Why a sequence ended, as one byte in packed columns. `NONE` means that it goes on."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    GRAMMAR_END = 3
    ABORT = 4
    ERROR = 5
    PREEMPTED = 6


class _Struct(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Common options of every wire type."""


class SamplingParams(_Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen and when it ends. `scheduler/sampling_params.py` checks ranges and meanings.

    `logprobs`/`prompt_logprobs`: number of alternatives beside the chosen token, -1 for the whole vocabulary.
    `seq_seed`: 0 <= seed < 2**63; None draws one at admission and reports it. `top_k`: 0 or -1 is off.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seq_seed: int | None = None
    so_args: dict[str, Any] | None = None


class OutputFormat(_Struct, frozen=True, kw_only=True):
    """How a rank and a client read the generated text; see `tokenizer/output_parser.py`.

    `kind` "text": everything is content. "chat": the state machine of the chat format, starting inside the
    reasoning when `in_reasoning`; `parse_tools` when tools were declared. `continues_prefix`: the answer goes on
    inside a given text, so newlines at its beginning belong to it.
    """

    kind: Literal["text", "chat"] = "text"
    in_reasoning: bool = False
    parse_tools: bool = False
    continues_prefix: bool = False


class GrammarSpec(_Struct, frozen=True, kw_only=True):
    """What an answer has to conform to, checked and in the form for the grammar engine (`schema_check`).

    `text` by `kind`: "json" a JSON Schema, "regex" a regular expression, "ebnf" a grammar with the rule `root`,
    "tool_calls" a JSON list of the functions (`name`, `parameters`) of which exactly one has to be called.
    """

    kind: Literal["json", "regex", "ebnf", "tool_calls"]
    text: str


class Request(_Struct, frozen=True, kw_only=True):
    """One prompt to be answered by `num_samples` sequences.

    `index` is the driver's number of the first sequence; sample i of the request is sequence `index + i`.
    `first_sample` is the sample number of that first sequence: not 0 only when one sequence of several is replayed.
    `num_prompt_tokens` is fixed at first admission; a replay carries `output_token_ids` behind the prompt.
    `sampling.seq_seed` is never None once the driver has admitted the request. `sampling.so_args` is None here: what
    it asks for stands in `grammar`, which holds from the end of the reasoning on if the output begins inside one.
    `label` is what the user calls the request, for log lines only.
    """

    request_id: str
    prompt_token_ids: bytes  # int32 column
    num_prompt_tokens: int
    sampling: SamplingParams
    index: int = -1
    first_sample: int = 0
    num_samples: int = 1
    output_token_ids: bytes = b""  # int32 column
    output_format: OutputFormat = OutputFormat()
    grammar: GrammarSpec | None = None
    priority: int = 0
    stream: bool = False
    label: str = ""


class LogprobColumns(_Struct, frozen=True, kw_only=True):
    """Log-probabilities of a run of tokens: token t owns `counts[t]` (int32) entries, its own token first.

    The other entries are the most likely tokens, by descending value, ties by ascending id; the token's own entry is
    repeated among them when it is one of them. A prompt's token 0 has count 0.
    """

    counts: bytes = b""
    token_ids: bytes = b""  # int32
    values: bytes = b""  # float32


class KVGroupExtent(_Struct, frozen=True, kw_only=True):
    """One KV group inside a hand-over buffer: `num_records` records from position `first_position`, `nbytes` long."""

    group: str
    first_position: int
    num_records: int
    nbytes: int


class KVPlace(_Struct, frozen=True, kw_only=True):
    """Where a hand-over lies in memory of its prefill rank, which ranks of the same host open with `memory`.

    It begins at byte `offset`, and stays until the driver gives `ticket` back (`PrefillBatch.released`). `sums` are
    those of `kv_transfer.piece_sums`.
    """

    memory: bytes
    offset: int
    ticket: int
    sums: tuple[int, int]


class KVHandle(_Struct, frozen=True, kw_only=True):
    """What a hand-over buffer holds. Without `place` the buffer travels beside the message, as an object reference.

    `num_tokens` tokens have their KV in the buffer. `checksum` is the CRC-32 of the whole buffer; with `place` it is 0,
    and its sums are there instead.
    """

    request_id: str
    source_rank: int
    num_tokens: int
    layout_digest: str
    groups: tuple[KVGroupExtent, ...]
    nbytes: int
    checksum: int
    place: KVPlace | None = None


class RequestFailure(_Struct, frozen=True, kw_only=True):
    """One request failed alone. `kind` is a `RequestError.code`; a retryable one may be sent again unchanged."""

    request_id: str
    index: int
    kind: str
    text: str
    retryable: bool = False


class RankLoad(_Struct, frozen=True, kw_only=True):
    """A rank's own numbers at `step_id`; they correct the driver's estimates."""

    rank: int
    step_id: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_free_blocks: dict[str, int] = {}
    step_seconds: float = 0.0
    device_idle_share: float = 0.0


class PrefillBatch(_Struct, frozen=True, kw_only=True, tag="prefill_batch"):
    """Driver to a prefill rank. Without requests it only wakes the rank (`wake_id`, see `distributed/step_sync`).

    `drops_all`: everything that came before is given up, without a result. `released`: tickets of hand-overs in this
    rank's memory that nobody reads any more. `device_handover`: from now on hand-overs may lie there.
    """

    batch_id: int
    wake_id: int
    requests: tuple[Request, ...] = ()
    aborted_indexes: bytes = b""  # int32
    drops_all: bool = False
    released: bytes = b""  # int32
    device_handover: bool = False


class PrefilledRequest(_Struct, frozen=True, kw_only=True):
    """A finished prefill. `first_token_ids` has `num_samples` entries, `finish_codes` one byte for each of them.

    `kv` is None exactly when every sample is already finished: then nothing is handed over.
    """

    request_id: str
    index: int
    first_token_ids: bytes  # int32
    finish_codes: bytes  # uint8
    first_logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    num_cached_tokens: int = 0
    kv: KVHandle | None = None


class PrefillResult(_Struct, frozen=True, kw_only=True, tag="prefill_result"):
    """Prefill rank to driver. Object references of KV buffers stand beside it, in the order of their `items`.

    These are the items with a kv that has no place.
    """

    rank: int
    items: tuple[PrefilledRequest, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    load: RankLoad


class AdmittedRequest(_Struct, frozen=True, kw_only=True):
    """A prefilled request for a decode rank: the sequences of `request` whose first token did not finish them.

    `sample_offsets` (int32) are their places among the request's samples, `first_token_ids` (int32) their tokens.
    """

    request: Request
    sample_offsets: bytes
    first_token_ids: bytes
    kv: KVHandle


class DecodeBatch(_Struct, frozen=True, kw_only=True, tag="decode_batch"):
    """Driver to a decode rank. KV buffers travel beside it, in the order of those `admitted` whose kv has no place.

    Empty: only a wake. `drops_all`: everything that came before is given up, without a result. `closes_memory`: the
    prefill ranks have died, so nothing in their memory is of use any more.
    """

    batch_id: int
    wake_id: int
    admitted: tuple[AdmittedRequest, ...] = ()
    aborted_indexes: bytes = b""  # int32
    drops_all: bool = False
    closes_memory: bool = False


class DecodeResult(_Struct, frozen=True, kw_only=True, tag="decode_result"):
    """Tokens of a decode rank since its last result, packed: sequence s owns `num_tokens[s]` entries of `token_ids`.

    A sequence with finish code `PREEMPTED` hands itself back for a replay; all its tokens so far have been sent.
    """

    rank: int
    step_id: int
    sequence_indexes: bytes = b""  # int32
    num_tokens: bytes = b""  # int32
    token_ids: bytes = b""  # int32
    finish_codes: bytes = b""  # uint8
    num_drafted: bytes = b""  # int32
    num_accepted: bytes = b""  # int32
    logprob_sequences: bytes = b""  # int32: places in `sequence_indexes` that carry log-probabilities
    logprobs: tuple[LogprobColumns, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    load: RankLoad


class RequestOutput(_Struct, frozen=True, kw_only=True):
    """The tokens of one sequence since the last such message (all of them unless `stream`).

    `finish` is `NONE` for a partial output. `error` is set when the request failed; it then has no other result.
    """

    request_id: str
    sample: int = 0
    first_position: int = 0  # how many output tokens were sent before these
    token_ids: bytes = b""  # int32
    finish: FinishCode = FinishCode.NONE
    logprobs: tuple[LogprobColumns, ...] = ()
    prompt_logprobs: LogprobColumns | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    prefill_rank: int = -1
    decode_rank: int = -1
    seed: int = 0
    error: RequestFailure | None = None


class RequestBatch(_Struct, frozen=True, kw_only=True, tag="request_batch"):
    """Client to driver: new requests of one job (`index` still -1), and ids of requests it gives up."""

    job_id: str
    requests: tuple[Request, ...] = ()
    aborted_ids: tuple[str, ...] = ()


class OutputBatch(_Struct, frozen=True, kw_only=True, tag="output_batch"):
    """Driver to client: what happened to a job's requests since the last call. `fatal` set: the engine has failed.

    `num_generated`: tokens that its sequences have got since then, those included that are sent only with an end.
    """

    outputs: tuple[RequestOutput, ...] = ()
    num_generated: int = 0
    fatal: str | None = None


class RankReady(_Struct, frozen=True, kw_only=True, tag="rank_ready"):
    """A rank has loaded its weights and can take work. Digests must be equal over the ranks that exchange KV."""

    rank: int
    role: Role
    node: str
    device: str
    pid: int
    num_blocks: dict[str, int]
    num_slots: int
    kernel_set: dict[str, str]
    model_digest: str
    layout_digest: str
    version: str


class StepProfile(_Struct, frozen=True, kw_only=True):
    """What a rank's profiler saw of `num_steps` steps in `seconds`.

    `trace` is a gzipped Chrome trace.
    """

    num_steps: int
    seconds: float
    trace: bytes


Message = PrefillBatch | PrefillResult | DecodeBatch | DecodeResult | RequestBatch | OutputBatch | RankReady
