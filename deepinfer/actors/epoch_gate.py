"""Which driver a rank obeys: each driver of an engine has an epoch of its own, and a later one takes the ranks over.

A driver that has died may still have calls on their way, and one that was only cut off does not know that it is
replaced. So every call that gives work or takes results names its epoch, and passes here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepinfer.errors import SupersededError


class EpochGate:
    """The epoch in force. Nothing that an older driver asked for happens while a newer one takes over, or later."""

    def __init__(self, epoch: int) -> None:
        """Obey the driver of `epoch`."""
        self._epoch = epoch
        self._num_passing = 0
        self._changed = threading.Condition()

    @property
    def epoch(self) -> int:
        """The epoch in force."""
        return self._epoch

    @contextmanager
    def passing(self, epoch: int) -> Iterator[None]:
        """Do what a call of `epoch` asks for; raises SupersededError unless that epoch is in force."""
        with self._changed:
            self._check(epoch)
            self._num_passing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_passing -= 1
                self._changed.notify_all()

    @contextmanager
    def advancing(self, epoch: int) -> Iterator[None]:
        """Let `epoch` be in force, and do what begins with it once the last call of an older one has passed.

        Calls of `epoch` come only after that: their driver waits for it. Raises SupersededError unless it is newer.
        """
        with self._changed:
            if epoch <= self._epoch:
                raise SupersededError(f"epoch {epoch} can't replace epoch {self._epoch}")
            self._epoch = epoch
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_passing == 0)
            yield

    def notify(self) -> None:
        """Have `wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, epoch: int, is_over: Callable[[], bool]) -> None:
        """Wait until `is_over`; raises SupersededError as soon as `epoch` is not in force."""
        with self._changed:
            self._changed.wait_for(lambda: is_over() or self._epoch != epoch)
            self._check(epoch)

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise SupersededError(
                f"this driver (epoch {epoch}) is not obeyed: the ranks belong to the one of epoch {self._epoch}"
            )
