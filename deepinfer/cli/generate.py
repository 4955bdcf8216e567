"""`deepinfer generate`: one-off prompts, answered token by token on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.cli.options import Address, Cluster, Model, Settings, Verbose, load_options, log_level
from deepinfer.errors import ConfigError
from deepinfer.llm import LLM
from deepinfer.log import set_up_logging
from deepinfer.outputs import ChatOptions, Row
from deepinfer.protocol import SamplingParams
from deepinfer.scheduler.sampling_params import check_sampling
from deepinfer.schema_check import grammar_of_so_args
from deepinfer.tokenizer import OutputDelta


def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="One or more prompts.")],
    model: Model = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's message.")] = False,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="With --chat: let the model think first, on stderr.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Largest number of generated tokens.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 is off.")] = 0,
    min_p: Annotated[float, typer.Option("--min-p", help="Smallest probability relative to the largest.")] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Stop string; repeatable.", show_default=False)
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="File with a JSON Schema for the answer.", show_default=False)
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Regular expression for the whole answer.", show_default=False)
    ] = None,
    ebnf: Annotated[
        Path | None, typer.Option("--ebnf", help="File with a grammar for the answer, rule root.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same answer.", show_default=False)] = None,
    cluster: Cluster = None,
    address: Address = None,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Answer prompts and print the text as it comes.

    Example: deepinfer generate "The capital of France is" --model tiny --max-tokens 16
    """
    config = load_options(cluster, settings=settings, model=model, address=address).config
    set_up_logging(log_level(config, verbose=verbose))
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=tuple(stop or ()),
        seq_seed=seed,
        so_args=_so_args(json_schema, regex, ebnf),
    )
    _check(params)
    with LLM(cluster=config, attach=cluster is not None) as llm:
        for prompt in prompts:
            if chat:
                messages = [{"role": "user", "content": prompt}]
                row = Row(tag=0, messages=messages, chat=ChatOptions(thinking=thinking), params=params)
            else:
                row = Row(tag=0, prompt=prompt, params=params)
            _print_answer(llm.stream_row(row))


def _check(params: SamplingParams) -> None:
    """Raise RequestError before anything is started. No option names a token id, so no vocabulary is needed."""
    check_sampling(params, vocab_size=0, max_logprobs=None)
    if params.so_args is not None:
        grammar_of_so_args(params.so_args)


def _print_answer(pieces: Iterator[OutputDelta]) -> None:
    """Print the content on stdout as it comes, and what the model thinks before it on stderr."""
    is_thinking = False
    for piece in pieces:
        if piece.reasoning:
            is_thinking = True
            print(piece.reasoning, end="", flush=True, file=sys.stderr)
        if piece.content:
            if is_thinking:
                is_thinking = False
                print(file=sys.stderr, flush=True)
            print(piece.content, end="", flush=True)
    print(flush=True)


def _so_args(json_schema: Path | None, regex: str | None, ebnf: Path | None) -> dict[str, Any] | None:
    given = [
        {"schema_type": kind, "schema": value if isinstance(value, str) else _read(value, option)}
        for kind, option, value in (
            ("json", "--json-schema", json_schema),
            ("regex", "--regex", regex),
            ("ebnf", "--ebnf", ebnf),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError("only one of them can hold for an answer", path="--json-schema, --regex, --ebnf")
    return given[0] if given else None


def _read(file: Path, option: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}", path=option) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8 text ({error}); save it as UTF-8", path=option) from error
