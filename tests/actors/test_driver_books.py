"""The driver's books beside the scheduler: jobs and their clients, loads and their age."""

from __future__ import annotations

import pytest

from deepinfer.actors.driver_status import LoadBook
from deepinfer.actors.job_desk import JobDesk
from deepinfer.errors import RequestError
from deepinfer.protocol import FinishCode, RankLoad, Request, SamplingParams


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_closed_job_does_not_come_back_and_tells_why() -> None:
    desk = JobDesk(Clock())
    assert desk.hear("job")
    desk.close("job", "its client is silent")
    assert not desk.hear("job")
    assert not desk.has_jobs
    assert desk.why_closed("job") == "its client is silent"
    assert desk.why_closed("other") is None


def test_only_silent_jobs_are_silent() -> None:
    clock = Clock()
    desk = JobDesk(clock)
    desk.hear("old")
    clock.now += 10.0
    desk.hear("new")
    assert desk.silent_jobs(5.0) == ["old"]
    desk.hear("old")
    assert desk.silent_jobs(5.0) == []


def test_old_closed_jobs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.actors.job_desk._MAX_CLOSED_JOBS", 3)
    desk = JobDesk(Clock())
    for number in range(5):
        desk.close(f"job{number}", "closed")
    assert [desk.why_closed(f"job{number}") for number in range(5)] == [None, None, *["closed"] * 3]


def test_refusals_reach_their_job_once() -> None:
    desk = JobDesk(Clock())
    request = Request(request_id="r", prompt_token_ids=b"", num_prompt_tokens=0, sampling=SamplingParams())
    desk.refuse("job", request, RequestError("too many", code="too_many_requests"))
    assert desk.take_refusals("other") == ()
    (output,) = desk.take_refusals("job")
    assert (output.finish, output.error.kind, output.error.text) == (FinishCode.ERROR, "too_many_requests", "too many")
    assert desk.take_refusals("job") == ()


def test_a_load_says_how_old_it_is_and_goes_with_its_group() -> None:
    clock = Clock()
    book = LoadBook(clock)
    book.take("prefill", RankLoad(rank=0, num_running=1))
    clock.now += 7.0
    book.take("decode", RankLoad(rank=0, num_running=2))
    loads = book.describe()
    assert [(name, load["num_running"], load["age_seconds"]) for name, load in loads.items()] == [
        ("prefill-0", 1, 7.0),
        ("decode-0", 2, 0.0),
    ]
    book.drop("decode")
    assert list(book.describe()) == ["prefill-0"]
