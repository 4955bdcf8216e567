"""What ranks ask of Ray: whole devices, or equal shares of one that always fit together."""

from __future__ import annotations

import pytest

from deepinfer.actors.placement import bundle_amount, rank_share


@pytest.mark.parametrize("ranks_per_device", range(1, 17))
def test_all_shares_of_a_gpu_fit_on_it(ranks_per_device: int) -> None:
    share = rank_share("GPU", ranks_per_device)
    parts = round(share * 10_000)
    assert parts == pytest.approx(share * 10_000)  # Ray counts in ten-thousandths
    assert parts * ranks_per_device <= 10_000 < parts * (ranks_per_device + 1)


def test_a_rank_has_a_cpu_of_its_own() -> None:
    assert rank_share("CPU", 4) == 1


@pytest.mark.parametrize(
    ("num_ranks", "share", "amount"), [(1, 0.5, 0.5), (2, 0.5, 1), (3, 0.5, 2), (8, 1, 8), (2, 0.3333, 0.6666)]
)
def test_a_bundle_is_whole_devices_or_a_part_of_one(num_ranks: int, share: float, amount: float) -> None:
    assert bundle_amount(num_ranks, share) == amount
