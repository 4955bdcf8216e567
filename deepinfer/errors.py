"""Exceptions of the package: who is at fault, and what happens next.

`ConfigError` stops a start, `RequestError` becomes one row's error, `RankError` costs a group restart,
`ClusterError` ends the engine. Nothing else of ours is raised on purpose across a module border.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

# Characters of a value that a message repeats, and of a whole message: rows hold values and names of any length.
_MAX_SHOWN = 200
_MAX_MESSAGE = 1_000


class DeepInferError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(DeepInferError):
    """A user's setting is wrong; nothing was started.

    `path` is the dotted place in the configuration (`decode.ranks`), an environment variable or an option.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class CheckpointError(ConfigError):
    """A checkpoint is incomplete or differs from the model's tensor table; the message names the tensor."""


class RequestError(DeepInferError):
    """One request is wrong or failed; it becomes that row's error and never touches another row.

    `code` is a short machine-readable word (`invalid_value`, `context_length_exceeded`, ...), `param` names the
    field in the request body, if one is at fault. Both are cut in their middle where they would be endless.
    """

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(_cut(message, _MAX_MESSAGE))
        self.code = code
        self.param = None if param is None else _cut(param, _MAX_SHOWN)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    end = limit // 4
    return f"{text[: limit - end - 3]}...{text[-end:]}"


def invalid_value(param: str, problem: str) -> RequestError:
    """Return the error of a wrong value in the field `param`; `problem` goes on behind the field's name."""
    return RequestError(f"{param} {problem}", code="invalid_value", param=param)


def shown(value: object) -> str:
    """Return `value` for a message, cut to a length that a person reads."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


class RankError(DeepInferError):
    """A rank failed or stopped answering; its group has to be restarted."""

    def __init__(self, message: str, *, role: str, rank: int) -> None:
        super().__init__(f"{role} rank {rank}: {message}")
        self.message = message
        self.role = role
        self.rank = rank

    def __reduce__(self) -> tuple[Callable[..., RankError], tuple[()]]:
        """Pickle with the keyword arguments, so that the error survives the way from a rank to the driver."""
        return partial(RankError, self.message, role=self.role, rank=self.rank), ()


class ClusterError(DeepInferError):
    """The engine can't go on; the message says why and what the user can do."""


class SupersededError(ClusterError):
    """A rank obeys a newer driver: the one that hears this ends, and leaves the ranks alone."""
