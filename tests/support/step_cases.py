"""Random cases of the integer work around a forward pass, as in `op_cases` and `row_cases`: all of it bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from support.op_cases import Bench, Check, same
from torch import Tensor

from deepinfer.kernels.step_ops import ListShapes, RowLayout

NUM_SLOTS, TABLE_LENGTH, VOCABULARY = 40, 700, 97
SHAPES = ListShapes(window=20, ring=32, ring_rows=32 * NUM_SLOTS, tokens_per_block=16, open_pairs=8)


def same_parts(own: Any, wanted: Any) -> None:
    """Assert equal bits of all tensors of two results of an op."""
    for field in dataclasses.fields(wanted):
        same(getattr(own, field.name), getattr(wanted, field.name))


def tables(bench: Bench) -> dict[str, Tensor]:
    """The token table and the seeds of all slots."""
    return {
        "token_table": bench.integers(0, VOCABULARY, NUM_SLOTS, TABLE_LENGTH).int(),
        "seeds": bench.integers(0, 2**62, NUM_SLOTS),
    }


def layout_case(bench: Bench, lengths: Tensor, num_padding: int) -> dict[str, Any]:
    """Arguments of `lay_out_rows` for sequences of `lengths` [B]."""
    lengths = lengths.to(bench.device)
    num_sequences = len(lengths)
    slots = 1 + torch.randperm(NUM_SLOTS - 1, generator=bench.generator)[:num_sequences].to(bench.device)
    return {
        "slots": slots,
        "first_positions": bench.integers(0, 300, num_sequences),
        "lengths": lengths,
        "num_rows": int(lengths.sum()) + num_padding,
        "width": 4,
        **tables(bench),
    }


def list_arguments(bench: Bench, layout: RowLayout) -> tuple[Any, ...]:
    """Arguments of `list_rows` behind the padding flags."""
    num_sequences = len(layout.slots)
    return (
        bench.integers(0, 500, num_sequences, TABLE_LENGTH // SHAPES.tokens_per_block + 1),
        None,
        bench.normal(2, 6, dtype=torch.float32),
        SHAPES,
    )


def check_step_lists(bench: Bench) -> None:
    """Layouts of decode rows, of chunks and of nothing, and the lists of their rows."""
    for lengths, num_padding in (
        (torch.tensor([1, 0, 4, 4, 2, 0]), 5),
        (torch.tensor([200, 3, 1]), 0),
        (torch.ones(33, dtype=torch.int64), 31),
        (torch.zeros(0, dtype=torch.int64), 1),
        (torch.zeros(2, dtype=torch.int64), 3),
    ):
        case = layout_case(bench, lengths, num_padding)
        layout = bench.kernels.lay_out_rows(**case)
        same_parts(layout, bench.reference.lay_out_rows(**case))
        rows = (layout.positions, layout.sequence, layout.slots, layout.starts, layout.is_padding)
        blocks, _, frequencies, shapes = list_arguments(bench, layout)
        seen_from = bench.integers(0, 400, len(layout.slots))
        for seen in (None, seen_from):
            given = (*rows, blocks, seen, frequencies, shapes)
            same_parts(bench.kernels.list_rows(*given), bench.reference.list_rows(*given))
        _check_padding_in_the_last_sequence(bench, layout, (blocks, None, frequencies, shapes))
        past = {"token_table": case["token_table"], "token_map": bench.integers(0, 50, VOCABULARY)}
        histories = [
            kernels.token_history(*rows[:3], **past, length=3, pad_id=-7)
            for kernels in (bench.kernels, bench.reference)
        ]
        same(*histories)


def _check_padding_in_the_last_sequence(bench: Bench, layout: RowLayout, rest: tuple[Any, ...]) -> None:
    """As `ForwardInputs` allows."""
    if len(layout.slots) > 1 and int(layout.starts[-2]) > int(layout.starts[-3]):
        sequence = layout.sequence.clamp_max(len(layout.slots) - 2)
        starts = torch.cat((layout.starts[:-2], layout.starts[-1:]))
        given = (layout.positions, sequence, layout.slots[:-1], starts, layout.is_padding, rest[0][:-1], *rest[1:])
        same_parts(bench.kernels.list_rows(*given), bench.reference.list_rows(*given))


Run = Callable[[Tensor], list[Tensor]]
NUM_ROWS = 256  # as in `row_cases`


def _singles(bench: Bench) -> Callable[[Tensor], RowLayout]:
    """A layout of sequences of one row each."""
    slots, firsts = bench.integers(1, NUM_SLOTS, NUM_ROWS), bench.integers(0, 300, NUM_ROWS)
    by_slot = tables(bench)

    def lay_out(rows: Tensor) -> RowLayout:
        return bench.kernels.lay_out_rows(
            slots[rows], firsts[rows], torch.ones_like(rows), **by_slot, num_rows=len(rows), width=2
        )

    return lay_out


def _lay_out_rows(bench: Bench) -> Run:
    lay_out = _singles(bench)

    def run(rows: Tensor) -> list[Tensor]:
        layout = lay_out(rows)
        return [layout.positions, layout.token_ids, layout.row_slots, layout.seeds, layout.drafts, layout.is_padding]

    return run


def _list_rows(bench: Bench) -> Run:
    """Numbers of a step's own rows are left out: they say where in the step a row stands."""
    lay_out = _singles(bench)
    blocks, _, frequencies, shapes = list_arguments(bench, lay_out(torch.arange(NUM_ROWS, device=bench.device)))

    def run(rows: Tensor) -> list[Tensor]:
        layout = lay_out(rows)
        table = torch.cat((blocks[rows], blocks[-1:]))
        lists = bench.kernels.list_rows(
            layout.positions, layout.sequence, layout.slots, layout.starts, layout.is_padding, table, None,
            frequencies, shapes,
        )  # fmt: skip
        by_row = (lists.visible.T, lists.targets.T, lists.angles.transpose(0, 1))
        stored = torch.where(lists.window_rows >= shapes.ring_rows, -2, lists.window_rows)
        return [stored, lists.ring_targets, lists.pair_first_rows, lists.pair_targets, *by_row]

    return run


def _token_history(bench: Bench) -> Run:
    positions, slots = bench.integers(0, 300, NUM_ROWS), bench.integers(1, NUM_SLOTS, NUM_ROWS)
    table, token_map = tables(bench)["token_table"], bench.integers(0, 50, VOCABULARY)
    past = {"token_table": table, "token_map": token_map}
    sequence = torch.arange(NUM_ROWS, device=bench.device)

    def run(rows: Tensor) -> list[Tensor]:
        own = sequence[: len(rows)]
        return [bench.kernels.token_history(positions[rows], own, slots[rows], **past, length=4, pad_id=2)]

    return run


CHECKS: dict[str, Check] = {"step_lists": check_step_lists}
CASES: dict[str, Callable[[Bench], Run]] = {
    "lay_out_rows": _lay_out_rows,
    "list_rows": _list_rows,
    "token_history": _token_history,
}
