"""Does something for the groups of an engine side by side, and says the same of a failure whichever fails first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from deepinfer.errors import DeepInferError, RankError

T = TypeVar("T")
# Two groups that wait for the same places give up at nearly the same time; so long the second failure is waited for.
_SECOND_FAILURE_SECONDS = 3.0


async def start_together(starts: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all starts and return their results, in order.

    The first failure ends the others, but for a moment in which they may fail too: then the error is the first one in
    the order of `starts`, and names the others. What is still starting then is cancelled, and waited for.
    """
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_SECOND_FAILURE_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if errors:
        raise _join(errors)
    return [task.result() for task in tasks]


def _join(errors: Sequence[BaseException]) -> BaseException:
    """Return the first error, with the texts of the others behind its own."""
    first = errors[0]
    texts = list(dict.fromkeys(str(error) for error in errors))
    if len(texts) == 1 or not isinstance(first, DeepInferError) or isinstance(first, RankError):
        return first
    return type(first)("; ".join(texts))
