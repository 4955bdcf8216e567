"""The Python door: `LLM` starts an engine and answers prompts, chats and streams of rows.

Where nothing else is said it behaves like the class of the same name in vLLM. A request that fails comes back with
`error` set; an exception means that the engine itself can't go on.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec
from ray.actor import ActorHandle

from deepinfer.actors.place_need import check_places
from deepinfer.actors.rank_life import RankProgram
from deepinfer.client import EngineClient, RequestMaker, Run
from deepinfer.config import ClusterConfig, load_config
from deepinfer.errors import ClusterError, ConfigError, RequestError
from deepinfer.launcher import (
    RayConnection,
    check_host,
    check_joinable,
    check_model_settings,
    find_driver,
    open_ray,
    resolve_for_ray,
    resolve_here,
    revive,
    start_engine,
    stop_engine,
)
from deepinfer.log import get_logger
from deepinfer.models.model_digest import model_digest
from deepinfer.models.model_source import resolve_model
from deepinfer.outputs import ChatOptions, CompletionOutput, RequestOutput, Row, RowResult, ToolCall
from deepinfer.protocol import SamplingParams
from deepinfer.tokenizer import OutputDelta, Tokenizer

__all__ = ["LLM", "ChatOptions", "CompletionOutput", "RequestOutput", "Row", "RowResult", "SamplingParams", "ToolCall"]

Prompt: TypeAlias = str | list[int]
Messages: TypeAlias = list[dict[str, Any]]

_LOGGER = get_logger("start")

_CHAT_FIELDS = tuple(ChatOptions.__dataclass_fields__)
_ROW_FIELDS = ("prompt", "messages", "params", "tag", *_CHAT_FIELDS)


class LLM:
    """An engine, from `LLM(...)` to `close()` or the end of the `with` block: one of its own, or a running one.

    `model`: "tiny", a checkpoint directory or a Hugging Face repository; None takes it from `cluster`, the environment
    or the default. `cluster`: a YAML file, a ClusterConfig, or None for this machine. `settings`: any config fields by
    dotted path, e.g. {"decode.ranks": 2}. Ray is started when this process has none and no address is configured.
    `attach`: use the engine of this name that `deepinfer-cluster up` has started, if it is up, and leave it running;
    it must be what is asked for. None: if `cluster` is a file. `rank_program` replaces the code that ranks run. Calls
    may come from several threads.
    Raises ConfigError (nothing was started) and ClusterError (the engine did not come up; nothing is left of it).
    """

    def __init__(
        self,
        model: str | None = None,
        cluster: str | Path | ClusterConfig | None = None,
        *,
        settings: Mapping[str, object] | None = None,
        attach: bool | None = None,
        rank_program: RankProgram | None = None,
    ) -> None:
        """Start or find the engine and wait until every rank is ready."""
        asked = _load(model, cluster, settings or {})
        here = resolve_here(asked)
        directory = resolve_model(here.model.path, revision=here.model.revision, cache_dir=Path(here.cache_dir))
        check_model_settings(here, directory)
        self.model_directory = directory
        self.tokenizer = Tokenizer.from_directory(directory)
        may_attach = isinstance(cluster, str | Path) if attach is None else attach
        connection = open_ray(here, attach=may_attach)
        own_driver: ActorHandle[Any] | None = None
        try:
            self.config = resolve_for_ray(asked, connection)
            client = _join(self.config, directory) if may_attach else None
            if client is None:
                if connection.folder is not None:  # a private Ray, to which no more nodes come
                    check_places(self.config)
                    if rank_program is None:
                        check_host(self.config, directory, with_ray=False)
                own_driver, started = start_engine(
                    self.config,
                    name=f"{self.config.name}-{secrets.token_hex(3)}",
                    model_directory=str(directory),
                    program=rank_program or RankProgram(),
                )
                client = EngineClient(own_driver, started)
        except BaseException:
            connection.close()
            raise
        self._end = weakref.finalize(self, _end, own_driver, connection)
        self._client = client
        facts = client.facts
        self._max_in_flight = _max_in_flight(self.config, facts.config)
        self.max_model_len = facts.max_model_len
        self._maker = RequestMaker(
            self.tokenizer,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            max_logprob_bytes=self.config.scheduler.max_logprob_bytes,
        )

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the engine."""
        self.close()

    def close(self) -> None:
        """Stop an engine of one's own and what was started for it, or leave a running one. May be called twice.

        It happens by itself at exit.
        """
        self._end()

    def status(self) -> dict[str, Any]:
        """Return the driver's state, counts, loads and restarts as plain values."""
        self._check_open()
        return self._client.status()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Return one answer for each prompt, in their order; `outs[i]` belongs to `prompts[i]`.

        A prompt is a text, which gets BOS in front, or a list of token ids, taken as it is. `sampling_params`: one for
        all, or one for each.
        """
        single = isinstance(prompts, str) or (bool(prompts) and all(isinstance(entry, int) for entry in prompts))
        chosen: Sequence[Any] = [prompts] if single else list(prompts)
        params = _params_for(len(chosen), sampling_params)
        return self._answer_all([Row(tag=tag, prompt=prompt, params=params[tag]) for tag, prompt in enumerate(chosen)])

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = True,
        reasoning_effort: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return one answer for each conversation, in their order; a single list of messages is one conversation."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else list(messages)
        options = ChatOptions(
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
        )
        params = _params_for(len(conversations), sampling_params)
        return self._answer_all(
            [
                Row(tag=tag, messages=conversation, chat=options, params=params[tag])
                for tag, conversation in enumerate(conversations)
            ]
        )

    def generate_iter(
        self,
        rows: Iterable[Prompt | Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        max_in_flight: int | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield answers in finishing order, for any iterable of any length, in bounded memory.

        A row is a prompt, or a mapping with `prompt` or `messages` and, if wanted, `params` (default:
        `sampling_params`), `tag` and the options of `chat`. Each answer carries its row's `tag`, by default the row's
        place. The iterable is pulled on a thread of its own, never more than `max_in_flight` rows ahead.
        """
        tags: dict[int, Any] = {}

        def tagged() -> Iterator[Row]:
            for place, entry in enumerate(rows):
                row, tags[place] = _as_row(place, entry, sampling_params or SamplingParams())
                yield row

        for result in self.run_rows(tagged(), max_in_flight=max_in_flight):
            result.output.tag = tags.pop(result.tag)
            yield result.output

    def run_rows(
        self,
        rows: Iterable[Row],
        *,
        max_in_flight: int | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[RowResult]:
        """Yield the result of every row in finishing order; the entry for batch jobs.

        Rows are pulled lazily on a thread of their own. At most `max_in_flight` rows (default and limit:
        `scheduler.max_in_flight`) are between being pulled and being yielded, so neither a long source nor a slow
        caller makes memory grow. Closing the iterator gives up the rest. `on_tokens` hears now and then how many tokens
        have been generated since, those of unfinished rows included. Raises ClusterError when the engine fails, and
        whatever `rows` raises.
        """
        return self._run(rows, max_in_flight=max_in_flight, on_tokens=on_tokens).results()

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one answer in pieces; joined they are the final text. Raises RequestError."""
        row = Row(tag=0, prompt=prompt, params=sampling_params or SamplingParams())
        for delta in self.stream_row(row):
            if delta.content:
                yield delta.content

    def stream_row(self, row: Row) -> Iterator[OutputDelta]:
        """Yield the pieces of one answer, reasoning and tool calls included; joined they are the final answer.

        Raises RequestError when the request is refused or fails, also for more than one sample.
        """
        if row.params.n != 1:
            raise RequestError(f"n: a streamed answer has one sample, not {row.params.n}", param="n")
        for update in self._run([row], max_in_flight=1, stream=True).updates():
            yield from update.deltas
            if update.result is not None and update.result.output.error is not None:
                raise update.result.output.error

    def _run(
        self,
        rows: Iterable[Row],
        *,
        max_in_flight: int | None,
        stream: bool = False,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Run:
        self._check_open()
        limit = self._max_in_flight
        if max_in_flight is not None and not 1 <= max_in_flight <= limit:
            raise ConfigError(
                f"must lie in 1 .. {limit} (scheduler.max_in_flight), not {max_in_flight}", path="max_in_flight"
            )
        max_in_flight = max_in_flight or limit
        return Run(self._client, self._maker, rows, max_in_flight=max_in_flight, stream=stream, on_tokens=on_tokens)

    def _answer_all(self, rows: Sequence[Row]) -> list[RequestOutput]:
        answers: dict[int, RequestOutput] = {result.tag: result.output for result in self.run_rows(rows)}
        return [answers[tag] for tag in range(len(rows))]

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ClusterError("this LLM is closed; make a new one")


def _end(own_driver: ActorHandle[Any] | None, connection: RayConnection) -> None:
    if own_driver is not None:
        stop_engine(own_driver)
    connection.close()


def _join(config: ClusterConfig, directory: Path) -> EngineClient | None:
    """Return a client of the running engine of that name; None when none is up, ConfigError when it is another one.

    One whose driver has died gets a new one.
    """
    digest = model_digest(directory)
    if find_driver(config.name, namespace=config.ray.namespace) is None and not revive(config, digest):
        _LOGGER.info("no engine %r is up; starting a private one", config.name)
        return None
    client = EngineClient.connect(config.name, namespace=config.ray.namespace)
    check_joinable(config, digest, client.facts)
    _LOGGER.info("using the running engine %r", config.name)
    return client


def _max_in_flight(asked: ClusterConfig, engine: ClusterConfig) -> int:
    """Return how many requests this process may have open, and say so when that is less than it asks for."""
    wanted, allowed = asked.scheduler.max_in_flight, engine.scheduler.max_in_flight
    if wanted > allowed:
        _LOGGER.info("%d requests in flight (scheduler.max_in_flight): the engine allows no more", allowed)
    return min(wanted, allowed)


def _load(
    model: str | None, cluster: str | Path | ClusterConfig | None, settings: Mapping[str, object]
) -> ClusterConfig:
    """Return the config that is asked for; what depends on machines is still open."""
    if isinstance(cluster, ClusterConfig):
        if settings:
            raise ConfigError("settings can't be given beside a ClusterConfig; put them into it", path="settings")
        config = cluster
        if model is not None:
            config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=model))
    else:
        lines = [f"{path}={json.dumps(value)}" for path, value in settings.items()]
        config = load_config(cluster, settings=lines, model=model).config
    return config


def _params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"sampling_params: there are {len(params)} for {count} prompts; give one, or one for each",
            param="sampling_params",
        )
    return params


def _as_row(place: int, entry: Prompt | Mapping[str, Any], default: SamplingParams) -> tuple[Row, Any]:
    """Return the row of an entry of `generate_iter`, and its tag."""
    if not isinstance(entry, Mapping):
        return Row(tag=place, prompt=entry, params=default), place
    unknown = [name for name in entry if name not in _ROW_FIELDS]
    if unknown:
        raise RequestError(f"{unknown[0]}: unknown field; known: {', '.join(_ROW_FIELDS)}", param=unknown[0])
    row = Row(
        tag=place,
        prompt=entry.get("prompt"),
        messages=entry.get("messages"),
        chat=ChatOptions(**{name: entry[name] for name in _CHAT_FIELDS if name in entry}),
        params=entry.get("params") or default,
    )
    return row, entry.get("tag", place)
