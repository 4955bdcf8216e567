"""Finds the first stop string in a text that arrives in pieces."""

from __future__ import annotations


class StopMatcher:
    """Holds text back as long as it may be the beginning of a stop string.

    The first match is the one that ends first; of those that end together the longest. It does not depend on how the
    text is cut into pieces.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        assert all(stop), stop
        self._stop = stop
        self._include_stop = include_stop
        self._max_overlap = max((len(text) for text in stop), default=1) - 1
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is safe to show. After a match: all that remains of the text, and `stopped` is set."""
        start_of_new = len(self._held)
        self._held += text
        match = self._first_match(start_of_new)
        if match is not None:
            self.stopped = True
            shown, self._held = self._held[: match[1] if self._include_stop else match[0]], ""
            return shown
        cut = max(0, len(self._held) - self._max_overlap)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """All held text: no more will come."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self, start_of_new: int) -> tuple[int, int] | None:
        """(begin, end) in `_held` of the first match that ends behind `start_of_new`."""
        best: tuple[int, int] | None = None
        for stop in self._stop:
            begin = self._held.find(stop, max(0, start_of_new - len(stop) + 1))
            if begin < 0:
                continue
            candidate = (begin, begin + len(stop))
            if best is None or (candidate[1], candidate[0]) < (best[1], best[0]):
                best = candidate
        return best
