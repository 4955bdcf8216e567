"""Jobs take turns: a job of many requests does not hold up one of few, and draining starts nothing more."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer.codec import pack
from deepinfer.config import SchedulerConfig
from deepinfer.protocol import PrefillBatch, Request, SamplingParams
from deepinfer.scheduler.batch_scheduler import BatchScheduler
from deepinfer.scheduler.load_balancer import DecodeCapacity
from tests.support.fake_device import GROUPS


def make_scheduler(num_slots: int) -> BatchScheduler:
    return BatchScheduler(
        config=SchedulerConfig(),
        prefill_ranks=[0],
        decode_ranks=[DecodeCapacity(0, {group.name: 10_000 for group in GROUPS}, num_slots)],
        groups=GROUPS,
        draw_seed=lambda: 1,
    )


def submit(scheduler: BatchScheduler, job: str, count: int, *, first: int = 0, priority: int = 0) -> None:
    for number in range(first, first + count):
        request = Request(
            request_id=f"{job}{number}",
            prompt_token_ids=pack([1, 2]),
            num_prompt_tokens=2,
            sampling=SamplingParams(max_tokens=4),
            priority=priority,
        )
        scheduler.submit(job, request)


def started(scheduler: BatchScheduler) -> Iterator[str]:
    for outgoing in scheduler.next_batches():
        if isinstance(outgoing.batch, PrefillBatch):
            yield from (request.request_id for request in outgoing.batch.requests)


def test_a_small_job_gets_every_second_place_behind_a_large_one() -> None:
    scheduler = make_scheduler(num_slots=3)
    submit(scheduler, "large", 50)
    assert list(started(scheduler)) == ["large0", "large1", "large2"]
    submit(scheduler, "small", 3)
    scheduler.abort("large", [f"large{i}" for i in range(3)])
    assert list(started(scheduler)) == ["small0", "large3", "small1"]
    submit(scheduler, "third", 2)
    scheduler.abort("large", ["large3"])
    scheduler.abort("small", ["small0", "small1"])
    assert sorted(started(scheduler)) == ["large4", "small2", "third0"]


def test_a_job_alone_runs_in_order_and_saves_no_turns_while_it_is_idle() -> None:
    scheduler = make_scheduler(num_slots=2)
    submit(scheduler, "idle", 1)
    assert list(started(scheduler)) == ["idle0"]
    scheduler.abort("idle", ["idle0"])
    submit(scheduler, "busy", 6)
    for pair in (["busy0", "busy1"], ["busy2", "busy3"]):
        assert list(started(scheduler)) == pair
        scheduler.abort("busy", pair)
    submit(scheduler, "idle", 3, first=1)
    assert sorted(started(scheduler)) == ["busy4", "idle1"], "turns not taken earlier must not be made up for"


def test_priority_goes_before_turns() -> None:
    scheduler = make_scheduler(num_slots=2)
    submit(scheduler, "plain", 2)
    submit(scheduler, "urgent", 2, priority=1)
    assert list(started(scheduler)) == ["urgent0", "urgent1"]


def test_a_draining_scheduler_starts_nothing_more() -> None:
    scheduler = make_scheduler(num_slots=1)
    submit(scheduler, "job", 2)
    assert list(started(scheduler)) == ["job0"]
    scheduler.drain()
    scheduler.abort("job", ["job0"])
    assert list(started(scheduler)) == []
    assert scheduler.counts().num_waiting == 1
