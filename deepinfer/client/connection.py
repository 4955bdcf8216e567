"""The way to a running engine: its driver is found by the actor's name, and each call opens a job of its own there."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from deepinfer import codec
from deepinfer.actors.engine_facts import EngineFacts
from deepinfer.actors.supervisor import describe_death
from deepinfer.errors import ClusterError
from deepinfer.protocol import OutputBatch, Request, RequestBatch

# The driver answers long polls within a second; one that stays silent this long is gone or hangs.
_ANSWER_SECONDS = 60.0
_ASK_SECONDS = 1.0
# A caller may take its time over an answer and fetch nothing meanwhile, so that it is alive is said by a thread.
_BEAT_SECONDS = 5.0


class EngineClient:
    """A connection to one engine. Jobs are independent of each other, and threads may each open their own."""

    def __init__(self, driver: ActorHandle[Any], facts: EngineFacts) -> None:
        """Use the driver behind `driver`, which says of itself what `facts` hold."""
        self._driver = driver
        self.facts = facts

    @classmethod
    def connect(cls, name: str, *, namespace: str) -> EngineClient:
        """Return a connection to the running engine `name`; this process must be connected to its Ray.

        One that is still starting is waited for. Raises ClusterError when there is no such engine, or it has failed.
        """
        try:
            driver = ray.get_actor(f"{name}-driver", namespace=namespace)
        except ValueError:
            raise ClusterError(
                f"no engine {name!r} runs in the namespace {namespace!r} of this Ray; start it, or check the name"
            ) from None
        while (status := ask(driver.status.remote()))["state"] in ("created", "starting"):
            time.sleep(_ASK_SECONDS)
        if status["state"] != "ready":
            raise ClusterError(
                f"the engine {name!r} is {status['state']}: {status['fatal'] or 'it takes no new jobs'}; "
                "take it down, then bring it up again"
            )
        return cls(driver, ask(driver.facts.remote()))

    def open_job(self) -> Job:
        """Return a new job; close it to free what it still has in flight."""
        return Job(self._driver, beats=self.facts.is_shared)

    def status(self) -> dict[str, Any]:
        """Return the driver's numbers."""
        status: dict[str, Any] = ask(self._driver.status.remote())
        return status


class Job:
    """One caller's requests at the driver; request ids need to be unique only within it. For one thread at a time.

    `submit` alone may come from a second thread.
    """

    def __init__(self, driver: ActorHandle[Any], *, beats: bool = False) -> None:
        """Open a job with a random id. `beats`: tell the driver every few seconds that this process is alive."""
        self.job_id = secrets.token_hex(8)
        self._driver = driver
        self._lock = threading.Lock()
        self._is_closed = False
        self._unconfirmed: deque[Any] = deque()
        self._closing = threading.Event()
        if beats:
            threading.Thread(target=self._beat, name="deepinfer-beat", daemon=True).start()

    def submit(self, requests: Sequence[Request], *, aborted_ids: Sequence[str] = ()) -> None:
        """Send new requests, and ids of earlier ones that are given up.

        Calls may overtake each other on the way; giving up therefore waits until the driver has the earlier requests.
        """
        if aborted_ids:
            self._confirm()
        batch = RequestBatch(job_id=self.job_id, requests=tuple(requests), aborted_ids=tuple(aborted_ids))
        with self._lock:
            if not self._is_closed:  # a closed job must not come back to life at the driver
                self._unconfirmed.append(self._driver.submit.remote(codec.encode(batch)))

    def next_outputs(self, wait_seconds: float) -> OutputBatch:
        """Return what has happened to this job's requests since the last call; waits up to `wait_seconds` for news.

        Raises ClusterError when the driver is gone or the engine has failed.
        """
        answer = self._driver.next_outputs.remote(self.job_id, wait_seconds)
        self._confirm()
        batch = codec.decode(ask(answer))
        assert isinstance(batch, OutputBatch), type(batch)
        if batch.fatal is not None:
            raise ClusterError(batch.fatal)
        return batch

    def _confirm(self) -> None:
        """Wait until the driver has everything that was submitted; raises what it had against it."""
        while self._unconfirmed:
            ask(self._unconfirmed.popleft())

    def close(self) -> None:
        """Give up what is still in flight; the driver forgets the job. Nothing is sent after that."""
        self._closing.set()
        with self._lock:
            self._is_closed = True
            self._driver.close_job.remote(self.job_id)

    def _beat(self) -> None:
        while not self._closing.wait(_BEAT_SECONDS) and ray.is_initialized():
            self._driver.keep_job.remote(self.job_id)


def ask(reference: Any) -> Any:
    """Wait for an answer of the driver; raises ClusterError when it is gone or silent, else what it raised."""
    try:
        return ray.get(reference, timeout=_ANSWER_SECONDS)
    except GetTimeoutError:
        raise ClusterError(f"the driver has not answered for {_ANSWER_SECONDS:g} s") from None
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, ClusterError):
            raise cause from None
        raise ClusterError(f"the driver has failed: {describe_death(error)}") from error
