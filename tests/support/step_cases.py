"""Random cases of the integer work around a forward pass, as in `op_cases` and `row_cases`: all of it bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from support.op_cases import Bench, Check, same
from torch import Tensor

from deepinfer.kernels.step_ops import RingShapes, RowLayout

NUM_SLOTS, TABLE_LENGTH, VOCABULARY = 40, 700, 97
SHAPES = RingShapes(window=20, ring=32, ring_rows=32 * NUM_SLOTS)
BLOCKS = {"tokens_per_block": 16, "open_pairs": 8}


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
        bench.integers(0, 500, num_sequences, TABLE_LENGTH // BLOCKS["tokens_per_block"] + 1),
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
            same_parts(bench.kernels.list_rows(*given, **BLOCKS), bench.reference.list_rows(*given, **BLOCKS))
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
        same_parts(bench.kernels.list_rows(*given, **BLOCKS), bench.reference.list_rows(*given, **BLOCKS))


def check_draft_rows(bench: Bench) -> None:
    """Accepted runs, what is written into the slot table, and the rows of draft blocks."""
    counts = torch.tensor([-1, 0, 3, 2, 3, 1, -1, 3], device=bench.device)
    case = layout_case(bench, (counts + 1).cpu(), 6)
    layout = bench.reference.lay_out_rows(**case)
    layout = RowLayout(**{name: getattr(layout, name).to(bench.device) for name in layout.__dataclass_fields__})
    for share in (0.0, 0.5, 0.8, 1.0):
        draws = bench.integers(0, VOCABULARY, len(layout.drafts))
        kept = bench.integers(0, 1000, len(draws)) < 1000 * share
        failed = bench.integers(0, 8, len(draws)) == 0
        given = (torch.where(kept, layout.drafts.clamp_min(0), draws), failed, layout.drafts, layout.own_rows, counts)
        own, wanted = bench.kernels.accept_rows(*given), bench.reference.accept_rows(*given)
        same_parts(own, wanted)
        _check_written(bench, case, wanted.token_ids, wanted.counts)
    _check_written(bench, case, wanted.token_ids[:, :3], None)
    anchors = (bench.integers(0, 97, len(counts)), bench.integers(0, 300, len(counts)), case["slots"])
    anchors[2][-2:] = 0
    blocks = {
        "starts": bench.integers(0, 200, NUM_SLOTS),
        "frequencies": bench.normal(6, dtype=torch.float32),
        "noise_id": 96,
        "size": 5,
        "shapes": SHAPES,
    }
    same_parts(bench.kernels.draft_blocks(*anchors, **blocks), bench.reference.draft_blocks(*anchors, **blocks))


def _check_written(bench: Bench, case: dict[str, Any], token_ids: Tensor, counts: Tensor | None) -> None:
    columns = (case["token_table"], bench.integers(0, 300, NUM_SLOTS), bench.integers(0, 4, NUM_SLOTS))
    for column in columns:
        column[0] = 0
    slots = case["slots"].clone()
    slots[:1] = 0
    results, limits = [], columns[1] + bench.integers(0, 6, NUM_SLOTS)
    for kernels in (bench.kernels, bench.reference):
        written = [column.clone() for column in columns]
        same_parts(
            kernels.read_slots(*written, limits, slots=slots), bench.reference.read_slots(*written, limits, slots=slots)
        )
        kernels.write_tokens(*written, slots=slots, token_ids=token_ids, counts=counts)
        results.append(written)
    for own, wanted in zip(*results, strict=True):
        same(own, wanted)
    assert not torch.equal(results[0][0], columns[0])


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
            frequencies, shapes, **BLOCKS,
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


def _accept_rows(bench: Bench) -> Run:
    """Sequences of three rows."""
    drafts = bench.integers(0, 3, NUM_ROWS, 3)
    drafts[:, -1] = -1
    tokens, failed = bench.integers(0, 3, NUM_ROWS, 3), bench.integers(0, 9, NUM_ROWS, 3) == 0
    counts = bench.integers(-1, 3, NUM_ROWS)
    places = torch.arange(NUM_ROWS * 3, device=bench.device).view(-1, 3)

    def run(rows: Tensor) -> list[Tensor]:
        flat = tokens[rows].flatten(), failed[rows].flatten(), drafts[rows].flatten()
        done = bench.kernels.accept_rows(*flat, places[: len(rows)], counts[rows])
        return [done.token_ids, done.counts, done.failed]

    return run


def _read_slots(bench: Bench) -> Run:
    table, num_tokens = tables(bench)["token_table"], bench.integers(0, 9, NUM_SLOTS)
    num_drafts, limits = bench.integers(0, 4, NUM_SLOTS), num_tokens + bench.integers(0, 6, NUM_SLOTS)
    slots = bench.integers(0, NUM_SLOTS, NUM_ROWS)

    def run(rows: Tensor) -> list[Tensor]:
        done = bench.kernels.read_slots(table, num_tokens, num_drafts, limits, slots=slots[rows])
        return [done.positions, done.token_ids, done.room]

    return run


def _write_tokens(bench: Bench) -> Run:
    """A slot a row."""
    token_ids, counts = bench.integers(0, 9, NUM_ROWS, 3), bench.integers(0, 4, NUM_ROWS)
    num_tokens = bench.integers(0, 9, NUM_ROWS + 1)
    slots = torch.arange(1, NUM_ROWS + 1, device=bench.device)

    def run(rows: Tensor) -> list[Tensor]:
        table = torch.zeros(NUM_ROWS + 1, 20, dtype=torch.int32, device=bench.device)
        columns = (table, num_tokens.clone(), torch.full_like(num_tokens, 5))
        bench.kernels.write_tokens(*columns, slots=slots[rows], token_ids=token_ids[rows], counts=counts[rows])
        return [column[slots[rows]] for column in columns]

    return run


def _draft_blocks(bench: Bench) -> Run:
    """One row a block; its own number is left out."""
    ids, positions = bench.integers(0, 97, NUM_ROWS), bench.integers(0, 300, NUM_ROWS)
    slots, starts = bench.integers(0, NUM_SLOTS, NUM_ROWS), bench.integers(0, 200, NUM_SLOTS)
    frequencies = bench.normal(6, dtype=torch.float32)

    def run(rows: Tensor) -> list[Tensor]:
        done = bench.kernels.draft_blocks(
            ids[rows], positions[rows], slots[rows], starts=starts, frequencies=frequencies, noise_id=96, size=1,
            shapes=SHAPES,
        )  # fmt: skip
        return [done.token_ids, done.is_padding, done.window_rows[:, :-1], done.angles]

    return run


CHECKS: dict[str, Check] = {"step_lists": check_step_lists, "draft_rows": check_draft_rows}
CASES: dict[str, Callable[[Bench], Run]] = {
    "lay_out_rows": _lay_out_rows,
    "list_rows": _list_rows,
    "token_history": _token_history,
    "accept_rows": _accept_rows,
    "read_slots": _read_slots,
    "write_tokens": _write_tokens,
    "draft_blocks": _draft_blocks,
}
