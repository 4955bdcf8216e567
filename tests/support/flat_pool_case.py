"""Cases of the flat pool of bf16 rows, against plain formulas; on a CPU under Triton's interpreter."""

from __future__ import annotations

import torch
from support.op_cases import Bench, close, same

from deepinfer.kernels.nvidia.flat_pool import RecordFormats, flat_pool, row_numbers
from deepinfer.kernels.nvidia.latent_records import LatentRecords


def check_flat_pool(bench: Bench) -> None:
    """Values are those of the packed records, bit for bit; numbers of rows point into the one pool."""
    width = bench.sizes.head_dim
    for kind in ("window", "main"):
        own, packed = RecordFormats(bench.kernels.numerics)(kind, width), bench.reference.record_formats(kind, width)
        values = bench.wide(3 * bench.sizes.rows, width)
        same(own.unpack(own.pack(values)), packed.unpack(packed.pack(values)))
        assert own.name != packed.name, "ranks with other records must not exchange them"
        if kind == "window":
            sizes = bench.sizes
            latent, weight = bench.normal(sizes.rows, width), bench.normal(width)
            angle = bench.normal(sizes.rows, sizes.rotary // 2, dtype=torch.float32, scale=100)
            turned = [latent, weight, angle.cos(), angle.sin()]
            found = LatentRecords(bench.kernels.numerics)(*turned, epsilon=1e-6, record=own)
            wanted = bench.reference.latent_records(*turned, epsilon=1e-6, record=packed)
            close(own.unpack(found), packed.unpack(wanted), 5e-3)
    rows = torch.zeros(70 + 30 + 50 + 9, 2 * width, dtype=torch.uint8, device=bench.device)
    _, ring, main, step = rows.split([70, 30, 50, 9])
    rows.view(torch.bfloat16)[:] = torch.arange(len(rows), device=bench.device).unsqueeze(1)
    pool = flat_pool(ring, step, main)
    assert pool is not None
    window_rows = bench.integers(-1, 30 + 9, 9, bench.sizes.window)
    main_rows = bench.integers(-1, 50, 9, bench.sizes.selected).int()
    both = torch.cat((ring, step)).view(torch.bfloat16)[:, 0]
    places = -(-bench.sizes.window // 128) * 128
    window_rows[0], main_rows[0] = -1, -1
    main_rows[1], window_rows[1, 3:], window_rows[1, 2] = -1, -1, 5
    keys = row_numbers(pool, window_rows, main_rows, ring_length=30)
    numbers = keys.numbers[:, 0]
    for part, wanted, source in (
        (numbers[:, :places], window_rows, both),
        (numbers[:, places:], main_rows, main.view(torch.bfloat16)[:, 0]),
    ):
        assert part.shape[1] % 128 == 0
        found, padding = part[:, : wanted.shape[1]], part[:, wanted.shape[1] :]
        assert bool((padding == -1).all())
        same(found < 0, wanted < 0)
        known = wanted >= 0
        same(pool.rows[found[known].long(), 0, 0], source[wanted[known].long()])
    last = torch.where(numbers < 0, 0, torch.arange(numbers.shape[1], device=bench.device) + 1).amax(1)
    assert keys.lengths is not None
    same(keys.lengths.long(), last)
    assert keys.lengths[:2].tolist() == [0, 3]
    alone = row_numbers(pool, window_rows, None, ring_length=30)
    same(alone.numbers[:, 0], numbers[:, :places])
    assert flat_pool(ring, step.clone(), main) is None
