"""Compares what the files hold with what the config asks for, from headers alone."""

from __future__ import annotations

from deepinfer.models.checkpoint_files import CheckpointFiles, Deviation, TensorEntry
from deepinfer.models.deepseek_v41.tensor_table import TensorSpec, is_image_tensor


def compare_tensors(files: CheckpointFiles, table: dict[str, TensorSpec]) -> list[Deviation]:
    """Return every tensor that is missing, unexpected, or has another dtype or shape; table order, then names.

    Image tensors are known and never unexpected. Draft stages count: a checkpoint whose config has them must have
    their tensors, also where a rank doesn't draft.
    """
    deviations = []
    for name, spec in table.items():
        entry = files.entries.get(name)
        message = "is missing" if entry is None else _difference(entry, spec)
        if message:
            deviations.append(Deviation(name, message))
    deviations += [
        Deviation(name, f"is unexpected: this model has no such tensor ({files.entries[name].file.name})")
        for name in sorted(files.entries.keys() - table.keys())
        if not is_image_tensor(name)
    ]
    return deviations


def _difference(entry: TensorEntry, spec: TensorSpec) -> str | None:
    if (entry.dtype, entry.shape) == (spec.dtype, spec.shape):
        return None
    return f"is {entry.dtype} {list(entry.shape)}, {spec.dtype} {list(spec.shape)} is needed"
