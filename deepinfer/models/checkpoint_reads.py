"""Reading the byte ranges that a rank needs: in the order of the files, by several threads, through the page cache.

Bytes go with `preadv` straight into torch tensors, because numpy has no FP8 types. The ranks of a node share its page
cache, and with it every byte that more than one of them reads: the kernel fetches a page once, however many processes
wait for it. So each rank of a node begins with another part of what all of them read, which puts their reads of the
storage side by side, and finds the other parts in memory when it gets there.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from deepinfer.errors import CheckpointError
from deepinfer.models.checkpoint_files import FileRange

NUM_THREADS: Final = 8
PIECE_BYTES: Final = 16 << 20
STAGING_BYTES: Final = NUM_THREADS * PIECE_BYTES  # host memory of a load into another device, at most

_ADVICE_BYTES: Final = 1 << 20  # Linux cuts longer advice short
_REPORT_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Read:
    """One range and the tensor that it fills: `out` is contiguous, on any device, and as large as the range.

    `is_shared`: other ranks of the node read the same bytes. `name` is for error messages.
    """

    name: str
    source: FileRange
    out: torch.Tensor
    is_shared: bool


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is: bytes, and seconds since its begin. `what` says what is being read."""

    what: str
    done_bytes: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Which one of its group's ranks on this node a rank is, and how many they are."""

    index: int = 0
    num_ranks: int = 1


OnProgress = Callable[[LoadProgress], None]
_Item = TypeVar("_Item")


def read_all(
    reads: Sequence[Read], *, place: NodePlace, drops_own: bool = False, on_progress: OnProgress | None = None
) -> None:
    """Fill the tensors of `reads`; raises `CheckpointError` when a file ends too soon.

    What the ranks of the node share comes first, beginning with this rank's part of it. With `drops_own` the pages of
    ranges that no other rank of its group reads leave the page cache behind the read, so that the memory is kept for
    what is shared. `on_progress` is called by any thread, one at a time, at most twice a second and at the end.
    """
    shared = _pieces([read for read in reads if read.is_shared])
    own = _pieces([read for read in reads if not read.is_shared])
    first = _first_of_part(shared, place)
    meter = _Meter("loading weights", sum(piece.num_bytes for piece in (*shared, *own)), on_progress)
    buffers = _Buffers()

    def work(piece: _Piece) -> None:
        _read_piece(piece, buffers, drops=drops_own and not piece.is_shared)
        meter.add(piece.num_bytes)

    _on_threads(work, [*shared[first:], *shared[:first], *own])
    meter.end()


def read_ahead(ranges: Sequence[FileRange], *, place: NodePlace, on_progress: OnProgress | None = None) -> None:
    """Bring this rank's part of `ranges` into the page cache; the ranks of a node together bring all of it."""
    pieces = [piece for source in ranges for piece in _cut(source)]
    begin, end = (len(pieces) * part // place.num_ranks for part in (place.index, place.index + 1))
    pieces = pieces[begin:end]
    meter = _Meter("reading n-gram tables ahead", sum(piece.num_bytes for piece in pieces), on_progress)
    buffers = _Buffers()

    def work(piece: FileRange) -> None:
        with piece.file.open("rb", buffering=0) as file:
            _advise(file.fileno(), piece)
            _fill(file.fileno(), piece, buffers.take(piece.num_bytes), str(piece.file))
        meter.add(piece.num_bytes)

    _on_threads(work, pieces)
    meter.end()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Reads of one file that lie close together: what a thread does at a time."""

    reads: tuple[Read, ...]

    @property
    def num_bytes(self) -> int:
        return sum(read.source.num_bytes for read in self.reads)

    @property
    def is_shared(self) -> bool:
        return self.reads[0].is_shared


class _Buffers(threading.local):
    """One host buffer a thread, grown once; page-locked memory is copied to a CUDA device several times as fast."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[:num_bytes]


class _Meter:
    """Counts what all threads have read."""

    def __init__(self, what: str, total_bytes: int, on_progress: OnProgress | None) -> None:
        self._what, self._total, self._on_progress = what, total_bytes, on_progress
        self._begin = self._told = time.monotonic()
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if time.monotonic() - self._told >= _REPORT_SECONDS:
                self._tell()

    def end(self) -> None:
        self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._on_progress is not None:
            self._on_progress(LoadProgress(self._what, self._done, self._total, self._told - self._begin))


def _pieces(reads: Sequence[Read]) -> list[_Piece]:
    """Cut and gather the reads, sorted by place: a piece is no longer than PIECE_BYTES, in one file."""
    ordered = sorted(reads, key=lambda read: (read.source.file, read.source.begin))
    found: list[_Piece] = []
    current: list[Read] = []
    room = PIECE_BYTES
    for part in itertools.chain.from_iterable(_cut_read(read) for read in ordered):
        if current and (part.source.file != current[0].source.file or part.source.num_bytes > room):
            found.append(_Piece(tuple(current)))
            current, room = [], PIECE_BYTES
        current.append(part)
        room -= part.source.num_bytes
    return [*found, _Piece(tuple(current))] if current else found


def _cut_read(read: Read) -> Iterator[Read]:
    assert read.out.is_contiguous(), read.name
    flat = read.out.view(-1).view(torch.uint8)
    assert len(flat) == read.source.num_bytes, (read.name, len(flat), read.source.num_bytes)
    done = 0
    for source in _cut(read.source):
        yield Read(read.name, source, flat[done : done + source.num_bytes], read.is_shared)
        done += source.num_bytes


def _cut(source: FileRange) -> Iterator[FileRange]:
    for done in range(0, source.num_bytes, PIECE_BYTES):
        yield FileRange(source.file, source.begin + done, min(PIECE_BYTES, source.num_bytes - done))


def _first_of_part(pieces: Sequence[_Piece], place: NodePlace) -> int:
    """Return the number of the piece at which the part of `place` begins; parts have about equally many bytes."""
    begin = sum(piece.num_bytes for piece in pieces) * place.index // place.num_ranks
    ends = itertools.accumulate(piece.num_bytes for piece in pieces)
    return next((number for number, end in enumerate(ends) if end > begin), 0)


def _read_piece(piece: _Piece, buffers: _Buffers, *, drops: bool) -> None:
    with piece.reads[0].source.file.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        for read in piece.reads:
            _advise(descriptor, read.source)
        for read in piece.reads:
            if read.out.device.type == "cpu":
                _fill(descriptor, read.source, read.out, read.name)
                continue
            staged = buffers.take(read.source.num_bytes, pinned=read.out.device.type == "cuda")
            _fill(descriptor, read.source, staged, read.name)
            read.out.copy_(staged)
        if drops:
            for read in piece.reads:
                os.posix_fadvise(descriptor, read.source.begin, read.source.num_bytes, os.POSIX_FADV_DONTNEED)


def _advise(descriptor: int, source: FileRange) -> None:
    """Let the kernel fetch the whole range at once, while it is copied from its beginning."""
    for done in range(0, source.num_bytes, _ADVICE_BYTES):
        num_bytes = min(_ADVICE_BYTES, source.num_bytes - done)
        os.posix_fadvise(descriptor, source.begin + done, num_bytes, os.POSIX_FADV_WILLNEED)


def _fill(descriptor: int, source: FileRange, out: torch.Tensor, name: str) -> None:
    view = out.numpy().data
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], source.begin + done)
        if count == 0:
            raise CheckpointError(f"tensor {name}: {source.file} ended after {done} of {len(view)} bytes")
        done += count


def _on_threads(work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Run `work` on every item, in order of their begin; the first exception ends the rest."""
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="load")
    try:
        for done in [pool.submit(work, item) for item in items]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
