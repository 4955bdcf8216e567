"""Sparse attention over rows named by number, in blocks of 64 keys with a running maximum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.ops import Numerics, RecordFormat
from deepinfer.kernels.reference.abilities import implementation
from deepinfer.kernels.reference.matmul import pad_rows

_ROW_TILE = 16
_KEY_BLOCK = 64
_LOWEST = -1e30  # the running maximum starts here, so that a row without keys has probabilities of 0


@dataclass(slots=True, frozen=True)
class SparseAttention:
    """`ops.SparseAttention`. Tiles of 16 rows and blocks of 64 keys are padded: every product has the same shape."""

    numerics: Numerics

    def locate(self, **_keys: object) -> None:
        """Nothing: it looks for keys and reads them at once."""

    def __call__(
        self,
        query: Tensor,
        *,
        ring: Tensor,
        step_records: Tensor,
        window_rows: Tensor,
        window_record: RecordFormat,
        main: Tensor | None,
        main_rows: Tensor | None,
        main_record: RecordFormat | None,
        sink: Tensor,
        scale: float,
        located: None = None,  # noqa: ARG002
    ) -> Tensor:
        out = torch.empty_like(query)
        for start in range(0, query.shape[0], _ROW_TILE):
            rows = slice(start, start + _ROW_TILE)
            num_rows = query[rows].shape[0]
            wanted = pad_rows(window_rows[rows], _ROW_TILE, -1)
            keys, present = _window_keys(wanted, ring, step_records, window_record), wanted >= 0
            if main is not None:
                assert main_rows is not None
                assert main_record is not None
                wanted = pad_rows(main_rows[rows], _ROW_TILE, -1)
                keys = torch.cat((keys, main_record.unpack(main[wanted.clamp_min(0)])), 1)
                present = torch.cat((present, wanted >= 0), 1)
            tile = pad_rows(query[rows].float(), _ROW_TILE)
            out[rows] = self._attend(tile, keys, present, sink, scale)[:num_rows]
        return out

    def _attend(self, query: Tensor, keys: Tensor, present: Tensor, sink: Tensor, scale: float) -> Tensor:
        """query [R, H, d] and keys [R, K, d] float32, present [R, K] -> [R, H, d] model dtype."""
        maximum = query.new_full((*query.shape[:2], 1), _LOWEST)
        total, mixed = torch.zeros_like(maximum), torch.zeros_like(query)
        for start in range(0, keys.shape[1], _KEY_BLOCK):
            block, valid = _key_block(keys, present, start)
            scores = torch.bmm(query, block.transpose(1, 2)) * scale
            scores.masked_fill_(~valid.unsqueeze(1), -torch.inf)
            raised = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            probabilities, decay = torch.exp(scores - raised), torch.exp(maximum - raised)
            total = total * decay + probabilities.sum(-1, keepdim=True)
            rounded = probabilities.to(self.numerics.dtype).float()
            mixed = mixed * decay + torch.bmm(rounded, block)
            maximum = raised
        total = total + torch.exp(sink.view(1, -1, 1) - maximum)
        return (mixed / total).to(self.numerics.dtype)


def _window_keys(wanted: Tensor, ring: Tensor, step_records: Tensor, record: RecordFormat) -> Tensor:
    """Records named by `wanted` [R, W] (below len(ring): ring, else this step's rows), unpacked to float32."""
    own = wanted >= ring.shape[0]
    records = ring[wanted.clamp(0, ring.shape[0] - 1)]
    records[own] = step_records[wanted[own] - ring.shape[0]]
    return record.unpack(records)


def _key_block(keys: Tensor, present: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The `_KEY_BLOCK` keys from `start` on, padded with absent ones."""
    block, valid = keys[:, start : start + _KEY_BLOCK], present[:, start : start + _KEY_BLOCK]
    missing = _KEY_BLOCK - block.shape[1]
    if missing:
        block = torch.cat((block, block.new_zeros(block.shape[0], missing, block.shape[2])), 1)
        valid = torch.cat((valid, valid.new_zeros(valid.shape[0], missing)), 1)
    return block.contiguous(), valid


IMPLEMENTATIONS = (implementation("sparse_attention", SparseAttention),)
