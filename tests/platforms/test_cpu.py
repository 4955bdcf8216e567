"""The CPU stream: order, results, failures; and the choice of a platform."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.platforms.platform import detect_accelerator, load_platform
from deepinfer.platforms.transfer import to_device, to_host


def test_pieces_run_in_order_beside_the_caller() -> None:
    stream = load_platform("cpu").open_stream("test")
    gate, ran = threading.Event(), []
    first = stream.submit(lambda: (gate.wait(), ran.append(1), "first")[-1])
    second = stream.submit(lambda: (ran.append(2), torch.get_num_threads())[-1])
    assert not first.done()
    gate.set()
    assert (second.result(), first.result(), ran) == (1, "first", [1, 2])
    assert 0.0 < first.begin_seconds <= first.end_seconds <= second.begin_seconds <= second.end_seconds
    stream.close()


def test_a_failed_piece_breaks_the_stream() -> None:
    stream = load_platform("cpu").open_stream("test")
    ran: list[int] = []
    failed = stream.submit(lambda: 1 // 0)
    later = stream.submit(lambda: ran.append(1))
    for piece in (failed, later):
        with pytest.raises(ZeroDivisionError):
            piece.result()
    assert ran == []
    stream.close()


def test_a_closed_stream_fails_what_comes_later_instead_of_keeping_it_waiting() -> None:
    stream = load_platform("cpu").open_stream("test")
    stream.close()
    with pytest.raises(RuntimeError, match="test has been closed"):
        stream.submit(lambda: 1).result()


def test_a_platform_that_is_not_built_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"accelerator: 'ascend' is not available yet; use one of: cpu"):
        load_platform("ascend")
    assert detect_accelerator() in ("cpu", "nvidia")


def test_memory_of_the_host() -> None:
    memory = load_platform("cpu").memory_info()
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_a_capture_does_its_work_on_what_the_tensors_hold_then() -> None:
    platform = load_platform("cpu")
    data = torch.ones(2)
    replay = platform.capture(lambda: data * 2)
    data.fill_(4)
    assert replay().tolist() == [8, 8]
    assert not platform.has_graphs


def test_copies_to_the_host_are_copies() -> None:
    """What a step sent is not what the next one writes into the same tensor."""
    data = to_device(np.arange(3), torch.device("cpu"))
    sent = to_host(data)
    data.zero_()
    assert sent.tolist() == [0, 1, 2]
