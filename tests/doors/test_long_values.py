"""A row's error repeats no more than a readable piece of what is wrong in the row, wherever that stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer.batch_file.fields import CHAT, COMPLETIONS, FIELDS
from deepinfer.batch_file.rows import build_row
from deepinfer.client.preparing import RequestMaker
from deepinfer.errors import RequestError, shown
from deepinfer.models.model_source import resolve_model
from deepinfer.tokenizer import Tokenizer

_MAX_MESSAGE = 1_001
_LONG = "x" * 100_000
_MESSAGES = [{"role": "user", "content": "hi"}]
_VALUES: list[Any] = [_LONG, [_LONG], {_LONG: _LONG}, 10**3_000, [[1]] * 50_000, {"type": _LONG}, [{_LONG: 1}]]


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> RequestMaker:
    directory = resolve_model("tiny", revision=None, cache_dir=Path(tmp_path_factory.mktemp("tiny")))
    tokenizer = Tokenizer.from_directory(directory)
    return RequestMaker(tokenizer, vocab_size=512, max_model_len=256, max_logprob_bytes=1 << 20)


def _refusal(maker: RequestMaker, row: dict[str, Any]) -> RequestError | None:
    try:
        maker.prepare(build_row({"custom_id": "a", "method": "POST", "url": COMPLETIONS, **row}, 1).row, "r")
    except RequestError as error:
        return error
    return None


def _check(error: RequestError) -> None:
    assert len(str(error)) < _MAX_MESSAGE, str(error)[:300]
    assert len(error.param or "") < _MAX_MESSAGE


def test_a_value_is_cut_where_a_person_stops_reading() -> None:
    assert shown("short") == "'short'"
    assert len(shown(_LONG)) == 200
    assert shown(_LONG).endswith("xxx...")


@pytest.mark.parametrize("name", sorted(FIELDS[CHAT]))
def test_fields_of_a_chat(maker: RequestMaker, name: str) -> None:
    bodies = [{"messages": _MESSAGES, name: value} for value in _VALUES]
    errors = [error for body in bodies if (error := _refusal(maker, {"url": CHAT, "body": body}))]
    assert errors
    for error in errors:
        _check(error)


@pytest.mark.parametrize(
    "row",
    [
        {_LONG: 1},
        {"method": _LONG},
        {"url": _LONG},
        {"body": _LONG},
        {"body": {"prompt": "a", _LONG: 1}},
        {"body": {"prompt": [_LONG, 1]}},
        {"body": {"prompt": [10**3_000]}},
        {"body": {"prompt": "a", "logit_bias": {_LONG: 1}}},
        {"body": {"prompt": "a", "logit_bias": {"1": _LONG}}},
        {"body": {"prompt": "a", "so_args": {"schema_type": _LONG, "schema": ""}}},
        {"body": {"prompt": "a", "so_args": {"schema_type": "regex", "schema": "(" + _LONG}}},
        {"body": {"prompt": "a", "so_args": {"schema_type": "json", "schema": {_LONG: 1}}}},
        {"body": {"prompt": "a", "so_args": {"schema_type": "json", "schema": {"type": _LONG}}}},
        {"body": {"prompt": "a", "so_args": {"schema_type": "json", "schema": {"$ref": _LONG}}}},
        {
            "body": {
                "prompt": "a",
                "so_args": {"schema_type": "json", "schema": {"type": "object", "required": [_LONG]}},
            }
        },
        {
            "body": {
                "prompt": "a",
                "so_args": {"schema_type": "json", "schema": {"type": "object", "properties": {_LONG: {"not": {}}}}},
            }
        },
    ],
    ids=range(16),
)
def test_other_places_of_a_row(maker: RequestMaker, row: dict[str, Any]) -> None:
    error = _refusal(maker, row)
    assert error is not None
    _check(error)
