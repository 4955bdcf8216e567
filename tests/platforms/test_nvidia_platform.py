"""The CUDA platform: refusals on any machine, streams and memory on a GPU."""

from __future__ import annotations

import gc
import logging
import time
from itertools import pairwise

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.platforms.nvidia import CudaClock, CudaPiece, CudaStream, check_build, check_chip
from deepinfer.platforms.platform import load_platform


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0), (9, 9)])
def test_a_chip_without_kernels_is_refused_by_name(capability: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"Some GPU has compute capability {capability[0]}\.{capability[1]}.*9\.0"):
        check_chip("Some GPU", capability)


def test_untested_chips_start_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "deepinfer"):
        check_chip("Tested GPU", (9, 0))
        assert not caplog.messages
        check_chip("New GPU", (10, 0))
    assert "nobody has tested" in caplog.messages[0]


@pytest.mark.parametrize(("version", "text"), [(None, "without CUDA"), ("11.8", "CUDA 11.8"), ("12.6", "12.8")])
def test_an_unfit_torch_is_refused(version: str | None, text: str) -> None:
    check_build("12.8")
    check_build("13.0")
    with pytest.raises(ConfigError, match=text):
        check_build(version)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_a_torch_for_cpus_says_so() -> None:
    with pytest.raises(ConfigError, match="built without CUDA"):
        load_platform("nvidia")


class VirtualEvent:
    """A CUDA event on a device that is `now` milliseconds old and does every piece of work in `work` milliseconds."""

    now, work = 0.0, 30.0
    queued = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.happens = VirtualEvent.queued

    def record(self) -> None:
        self.happens = VirtualEvent.queued
        VirtualEvent.queued += VirtualEvent.work

    def query(self) -> bool:
        return self.happens <= VirtualEvent.now

    def synchronize(self) -> None:
        VirtualEvent.now = max(VirtualEvent.now, self.happens)

    def elapsed_time(self, end: VirtualEvent) -> float:
        assert end.query(), "CUDA refuses to time what has not happened"
        return end.happens - self.happens


def test_times_of_a_piece_that_nobody_waits_for_are_known_once_a_later_one_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", VirtualEvent)
    clock = CudaClock()
    pieces = [CudaPiece(lambda: 7, lambda: clock), CudaPiece(lambda: 8, lambda: clock)]
    assert [piece.run() for piece in pieces] == [None, None]
    assert [(piece.begin_seconds, piece.end_seconds) for piece in pieces] == [(0.0, 0.0)] * 2
    assert not pieces[0].done()
    assert pieces[1].result() == 8
    times = [seconds for piece in pieces for seconds in (piece.begin_seconds, piece.end_seconds)]
    assert [end - begin for begin, end in pairwise(times)] == pytest.approx([0.03] * 3)
    assert abs(times[0] - time.monotonic()) < 60


def test_a_piece_that_raises_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", VirtualEvent)
    piece = CudaPiece(lambda: 1 // 0, CudaClock)
    assert isinstance(piece.run(), ZeroDivisionError)
    assert piece.done()
    assert (piece.begin_seconds, piece.end_seconds) == (0.0, 0.0)


@pytest.mark.gpu
def test_pieces_run_in_order_while_the_host_goes_on() -> None:
    stream = CudaStream("test", torch.device("cuda", 0), num_threads=1)
    data = torch.zeros(1 << 24, device="cuda")
    begin = time.monotonic()
    pieces = [stream.submit(lambda step=step: data.mul_(2).add_(step)[0].clone()) for step in range(200)]
    assert not pieces[-1].done()
    assert int(pieces[2].result()) == 4
    assert begin <= pieces[0].begin_seconds <= pieces[0].end_seconds  # nobody has waited for it
    assert pieces[0].end_seconds <= pieces[2].end_seconds <= time.monotonic() + 1e-3
    stream.close()
    assert pieces[-1].done()


@pytest.mark.gpu
def test_a_failed_piece_breaks_the_stream() -> None:
    stream = CudaStream("test", torch.device("cuda", 0), num_threads=1)
    first, second = stream.submit(lambda: 1 // 0), stream.submit(lambda: 2)
    for piece in (first, second):
        with pytest.raises(ZeroDivisionError):
            piece.result()
    stream.close()


@pytest.mark.gpu
def test_a_graph_does_its_work_again_on_what_the_tensors_hold_then() -> None:
    platform = load_platform("nvidia")
    stream = platform.open_stream("test")
    data, total = torch.ones(8, device=platform.device), torch.zeros(8, device=platform.device)
    replays = [
        stream.submit(lambda factor=factor: platform.capture(lambda: total.add_(data * factor) * 2))
        for factor in (1, 10)
    ]
    one, ten = (replay.result() for replay in replays)
    stream.submit(lambda: (total.zero_(), data.fill_(3))).result()
    assert stream.submit(lambda: one().clone()).result().tolist() == [6.0] * 8
    assert stream.submit(lambda: ten().clone()).result().tolist() == [66.0] * 8
    assert stream.submit(lambda: one().clone()).result().tolist() == [72.0] * 8
    stream.close()


@pytest.mark.gpu
def test_no_garbage_is_collected_while_a_graph_is_recorded() -> None:
    """Its end could free graphs or release host memory, which the recording would not survive."""
    platform, seen = load_platform("nvidia"), []
    stream = platform.open_stream("test")
    data = torch.zeros(1, device=platform.device)
    stream.submit(lambda: platform.capture(lambda: (seen.append(gc.isenabled()), data.add_(1)))).result()
    assert seen == [True, False]
    assert gc.isenabled()
    stream.close()


@pytest.mark.gpu
def test_the_peak_of_some_work() -> None:
    platform = load_platform("nvidia")
    assert platform.peak_bytes(lambda: torch.empty(1 << 28, dtype=torch.uint8, device=platform.device)) == 1 << 28


@pytest.mark.gpu
def test_memory_that_torch_keeps_counts_as_free() -> None:
    platform = load_platform("nvidia")
    before = platform.memory_info()
    data = torch.empty(1 << 28, dtype=torch.uint8, device=platform.device)
    assert before.free_bytes - platform.memory_info().free_bytes >= 1 << 28
    del data
    assert abs(platform.memory_info().free_bytes - before.free_bytes) < 1 << 25
    assert platform.memory_info().total_bytes > before.free_bytes
