"""What ends a sequence on a rank: the stop rules, reading text only where a request has stop strings."""

from __future__ import annotations

from deepinfer.codec import unpack
from deepinfer.protocol import Request
from deepinfer.scheduler.stopping import StopChecker
from deepinfer.tokenizer import OutputParser, Tokenizer


def make_stop_checker(request: Request, *, tokenizer: Tokenizer, eos_token_id: int, max_model_len: int) -> StopChecker:
    """Return what ends one sequence of `request`; a replay's earlier output counts."""
    params = request.sampling

    def build_reader() -> OutputParser:
        return OutputParser(
            tokenizer,
            request.output_format,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )

    return StopChecker(
        params,
        eos_token_id=eos_token_id,
        num_prompt_tokens=request.num_prompt_tokens,
        max_model_len=max_model_len,
        output_token_ids=unpack(request.output_token_ids).tolist(),
        build_reader=build_reader,
    )
