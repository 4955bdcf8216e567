"""Pieces and their order: every byte once, a rank's own part first, nothing dropped that others read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from deepinfer.errors import CheckpointError
from deepinfer.models import checkpoint_reads
from deepinfer.models.checkpoint_files import FileRange
from deepinfer.models.checkpoint_reads import LoadProgress, NodePlace, Read, read_ahead, read_all

SIZES = (100, 1, 0, 4096, 9000, 33)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reads, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoint_reads, "NUM_THREADS", 1)


def make_reads(directory: Path, *, is_shared: bool = True) -> tuple[list[Read], list[bytes]]:
    """Two files of tensors of SIZES bytes with gaps between them, last tensor first; and what they hold."""
    reads, contents = [], []
    for number in range(2):
        path, data = directory / f"file-{number}", os.urandom(sum(SIZES) + 10 * len(SIZES))
        path.write_bytes(data)
        begin = 0
        for size in SIZES:
            source, out = FileRange(path, begin, size), torch.zeros(size, dtype=torch.uint8)
            reads.append(Read(f"{number}/{begin}", source, out, is_shared))
            contents.append(data[begin : begin + size])
            begin += size + 10
    return reads[::-1], contents[::-1]


def note_ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return the list to which every range is added as it is read: file, begin, end."""
    seen: list[tuple[str, int, int]] = []
    fill = checkpoint_reads._fill

    def noted(descriptor: int, source: FileRange, out: torch.Tensor, name: str) -> None:
        if source.num_bytes:
            seen.append((source.file.name, source.begin, source.begin + source.num_bytes))
        fill(descriptor, source, out, name)

    monkeypatch.setattr(checkpoint_reads, "_fill", noted)
    return seen


@pytest.mark.parametrize("place", [NodePlace(), NodePlace(1, 3), NodePlace(7, 8)])
def test_every_tensor_gets_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: NodePlace) -> None:
    seen = note_ranges(monkeypatch)
    reads, contents = make_reads(tmp_path)
    read_all(reads, place=place)
    assert [read.out.numpy().tobytes() for read in reads] == contents
    assert sum(end - begin for _, begin, end in seen) == 2 * sum(SIZES)
    assert max(end - begin for _, begin, end in seen) == 1000


def test_ranks_of_a_node_begin_in_different_parts_of_what_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = note_ranges(monkeypatch)
    reads, _ = make_reads(tmp_path)
    orders = []
    for index in range(4):
        read_all(reads, place=NodePlace(index, 4))
        orders.append(list(seen))
        seen.clear()
    assert [order[0][0] for order in orders] == ["file-0", "file-0", "file-1", "file-1"]
    assert len({order[0] for order in orders}) == 4
    for order in orders:  # in the order of the files, once around
        turn = order.index(min(order))
        assert order[turn:] + order[:turn] == sorted(order)


def test_only_own_ranges_leave_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are read after what is shared."""
    dropped: list[int] = []
    advise = os.posix_fadvise

    def noted(descriptor: int, begin: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append(length)
        advise(descriptor, begin, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    reads, _ = make_reads(tmp_path)
    own = [Read(read.name, read.source, read.out, is_shared=False) for read in reads[:6]]
    seen = note_ranges(monkeypatch)
    read_all([*own, *reads[6:]], place=NodePlace(), drops_own=True)
    assert sum(dropped) == sum(SIZES)
    assert [name for name, _, _ in seen] == sorted(name for name, _, _ in seen)
    dropped.clear()
    read_all([*own, *reads[6:]], place=NodePlace())
    assert not dropped


def test_a_node_reads_tables_ahead_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = note_ranges(monkeypatch)
    reads, _ = make_reads(tmp_path)
    ranges = [read.source for read in reads]
    told: list[LoadProgress] = []
    for index in range(3):
        read_ahead(ranges, place=NodePlace(index, 3), on_progress=told.append)
    assert len(seen) == len(set(seen))
    assert sum(end - begin for _, begin, end in seen) == 2 * sum(SIZES) == sum(step.done_bytes for step in told)


def test_a_file_that_ends_too_soon_is_named(tmp_path: Path) -> None:
    """The files may shrink after their headers were checked."""
    reads, _ = make_reads(tmp_path)
    os.truncate(tmp_path / "file-1", 5000)
    with pytest.raises(CheckpointError, match=r"tensor 1/\d+: .*file-1 ended after \d+ of \d+ bytes"):
        read_all(reads, place=NodePlace())
