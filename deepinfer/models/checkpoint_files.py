"""Safetensors files of a checkpoint directory: where each tensor's bytes are; `checkpoint_reads` reads them.

Format facts: a file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets) and
the data; several files are joined by `model.safetensors.index.json` (`weight_map`: name -> file).
"""

from __future__ import annotations

import itertools
import math
import mmap
import warnings
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from deepinfer.errors import CheckpointError

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
DTYPES: Final[dict[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # an exponent byte: converting the dtype numerically is the classic fault
    "I8": torch.uint8,  # two FP4 codes
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


class Deviation(msgspec.Struct, frozen=True):
    """One fault of a checkpoint: `name` is the tensor or the file at fault."""

    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


class FileRange(msgspec.Struct, frozen=True):
    """`num_bytes` bytes from the offset `begin` of `file`."""

    file: Path
    begin: int
    num_bytes: int


class TensorEntry(msgspec.Struct, frozen=True):
    """Where one tensor lies: `num_bytes` bytes from the absolute offset `begin` of `file`, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    num_bytes: int

    @property
    def source(self) -> FileRange:
        """All of its bytes."""
        return FileRange(self.file, self.begin, self.num_bytes)

    def rows(self, first_row: int, num_rows: int) -> FileRange:
        """The bytes of rows `first_row` .. `first_row + num_rows - 1`."""
        assert 0 <= first_row <= first_row + num_rows <= self.shape[0], (self.name, first_row, num_rows, self.shape)
        row_bytes = self.num_bytes // self.shape[0]
        return FileRange(self.file, self.begin + first_row * row_bytes, num_rows * row_bytes)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return memory for the tensor: the dtype of `DTYPES`, so E8M0 and FP4 are bytes."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype], device=device)

    def empty_rows(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return memory for so many of its rows."""
        return torch.empty((num_rows, *self.shape[1:]), dtype=DTYPES[self.dtype], device=device)


class CheckpointFiles:
    """The tensors of a checkpoint by name. Files are opened for each use and nothing is kept in memory."""

    def __init__(self, directory: Path, entries: dict[str, TensorEntry]) -> None:
        self.directory = directory
        self.entries = entries

    @property
    def files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        return sorted({entry.file for entry in self.entries.values()})

    def entry(self, name: str) -> TensorEntry:
        """Return where a tensor lies; raises `CheckpointError` when there is none of that name."""
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointError(f"tensor {name} is missing in {self.directory}") from None

    def read_head(self, name: str, max_bytes: int) -> bytes:
        """Return the first bytes of a tensor, `max_bytes` at most."""
        entry = self.entry(name)
        with entry.file.open("rb") as file:
            file.seek(entry.begin)
            return file.read(min(max_bytes, entry.num_bytes))

    def map(self, name: str) -> torch.Tensor:
        """Return a tensor as a memory map of its file: pages are read when touched and shared by all processes.

        Read-only: writing to the tensor ends the process. (A writable private map of a table larger than the memory
        would be refused by Linux's overcommit rule.) The kernel is told that accesses are random, so that a row that
        is not in memory costs a page and not a read-ahead.
        """
        entry = self.entry(name)
        dtype = DTYPES[entry.dtype]
        assert entry.begin % dtype.itemsize == 0, (name, entry.begin)
        if entry.num_bytes == 0:
            return entry.empty(torch.device("cpu"))
        skipped = entry.begin % mmap.ALLOCATIONGRANULARITY
        with entry.file.open("rb") as file:
            pages = mmap.mmap(
                file.fileno(), skipped + entry.num_bytes, prot=mmap.PROT_READ, offset=entry.begin - skipped
            )
        pages.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(pages, dtype=np.uint8, count=entry.num_bytes, offset=skipped)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(data).view(dtype).view(entry.shape)


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Read the index and all headers; raises `CheckpointError` at the first fault of `scan_checkpoint`."""
    files, deviations = scan_checkpoint(directory)
    raise_first(directory, deviations)
    return files


def raise_first(directory: Path, deviations: list[Deviation]) -> None:
    """Raise `CheckpointError` with the first deviation and the number of the others; nothing if there are none."""
    if deviations:
        more = f" (and {len(deviations) - 1} more; `deepinfer checkpoint verify` lists all)" if deviations[1:] else ""
        raise CheckpointError(f"{directory}: {deviations[0]}{more}")


def scan_checkpoint(directory: Path) -> tuple[CheckpointFiles, list[Deviation]]:
    """Read the index and all headers, never the data; return what is readable and every fault found.

    Faults: no index and no single file, a file that is missing, cut short or not safetensors, a tensor whose bytes
    don't fit its shape, a tensor that the index puts elsewhere or doesn't know, a wrong `total_size`.
    """
    if not directory.is_dir():
        return CheckpointFiles(directory, {}), [Deviation(str(directory), "is not a directory")]
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        if not (directory / SINGLE_FILE).exists():
            return CheckpointFiles(directory, {}), [Deviation(INDEX_FILE, f"does not exist, nor does {SINGLE_FILE}")]
        entries, deviations = _scan_file(directory / SINGLE_FILE)
        return CheckpointFiles(directory, {entry.name: entry for entry in entries}), deviations
    try:
        weight_map, total_size = _read_index(index_path)
    except CheckpointError as error:
        return CheckpointFiles(directory, {}), [Deviation(INDEX_FILE, str(error))]
    return _scan_shards(directory, weight_map, total_size)


def _scan_shards(
    directory: Path, weight_map: dict[str, str], total_size: int | None
) -> tuple[CheckpointFiles, list[Deviation]]:
    found: dict[str, TensorEntry] = {}
    deviations: list[Deviation] = []
    unread: set[str] = set()
    for file_name in sorted(set(weight_map.values())):
        entries, faults = _scan_file(directory / file_name)
        deviations += faults
        if not entries:
            unread.add(file_name)
        for entry in entries:
            expected = weight_map.get(entry.name)
            if expected == file_name:
                found[entry.name] = entry
            else:
                place = f"the index has it in {expected}" if expected else "the index does not list it"
                deviations.append(Deviation(entry.name, f"is in {file_name}, but {place}"))
    for name, file_name in weight_map.items():
        if name not in found and file_name not in unread:
            deviations.append(Deviation(name, f"is not in {file_name}, where the index has it"))
    size = sum(entry.num_bytes for entry in found.values())
    if total_size is not None and size != total_size and not deviations:
        deviations.append(Deviation(INDEX_FILE, f"total_size is {total_size}, the tensors have {size} bytes"))
    return CheckpointFiles(directory, found), deviations


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    try:
        index = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"can't be read as JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no `weight_map` with tensors")
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or not file_name.isprintable()
            or "/" in file_name
            or file_name in ("", ".", "..")
        ):
            raise CheckpointError(f"puts tensor {name} into {file_name!r}, which is not a file name")
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total_size is not None and not isinstance(total_size, int | float):
        raise CheckpointError(f"has total_size {total_size!r}, a number of bytes is needed")
    return weight_map, int(total_size) if total_size is not None else None


def _scan_file(path: Path) -> tuple[list[TensorEntry], list[Deviation]]:
    """Return the tensors whose bytes are all inside the file, and the faults."""
    try:
        header, data_begin = _read_header(path)
        file_bytes = path.stat().st_size
    except FileNotFoundError:
        return [], [Deviation(path.name, "does not exist, but tensors should be in it")]
    except (OSError, CheckpointError) as error:
        return [], [Deviation(path.name, str(error))]
    entries, deviations = [], []
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        try:
            entries.append(_parse_entry(path, name, fields, data_begin, file_bytes))
        except CheckpointError as error:
            deviations.append(Deviation(name, str(error)))
    return entries, deviations + _overlaps(path, entries)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the decoded header and the offset of the first data byte."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
            raise CheckpointError("is not a safetensors file: no valid header length")
        text = file.read(length)
    if len(text) < length:
        raise CheckpointError(f"is cut short inside its header: {len(text)} of {length} bytes are there")
    try:
        header = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise CheckpointError("is not a safetensors file: the header is no JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError("is not a safetensors file: the header is no JSON object")
    return header, 8 + length


def _parse_entry(path: Path, name: str, fields: Any, data_begin: int, file_bytes: int) -> TensorEntry:
    try:
        dtype, shape = fields["dtype"], tuple(int(size) for size in fields["shape"])
        begin, end = (int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"has a broken header entry in {path.name}: {fields!r}") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"has dtype {dtype}, which no tensor of this model has")
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if begin < 0 or end - begin != num_bytes or min(shape, default=0) < 0:
        raise CheckpointError(f"{dtype} {list(shape)} needs {num_bytes} bytes, {path.name} gives it {begin}..{end}")
    if data_begin + end > file_bytes:
        raise CheckpointError(f"ends at byte {data_begin + end} of {path.name}, which is cut short at {file_bytes}")
    return TensorEntry(name, dtype, shape, path, data_begin + begin, num_bytes)


def _overlaps(path: Path, entries: list[TensorEntry]) -> list[Deviation]:
    ordered = sorted((entry for entry in entries if entry.num_bytes), key=lambda entry: entry.begin)
    return [
        Deviation(second.name, f"shares bytes of {path.name} with {first.name}")
        for first, second in itertools.pairwise(ordered)
        if first.begin + first.num_bytes > second.begin
    ]
