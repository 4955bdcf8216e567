"""Which rank gets a request, and what reservations and reports do to the choice."""

from __future__ import annotations

from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.protocol import RankLoad, Request, SamplingParams
from deepinfer.scheduler.load_balancer import DecodeCapacity, LoadBalancer

GROUPS = (KVGroup("main", "paged", 10, 1, True, "a"), KVGroup("window", "sequence", 4, 1, False, "b"))


def balancer(*num_blocks: int, num_slots: int = 9) -> LoadBalancer:
    ranks = [DecodeCapacity(rank, {"main": count + 1}, num_slots) for rank, count in enumerate(num_blocks)]
    return LoadBalancer(groups=GROUPS, prefill_ranks=[0, 1], decode_ranks=ranks)


def request(num_tokens: int, max_tokens: int, num_samples: int = 1) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=b"\0\0\0\0" * num_tokens,
        num_prompt_tokens=num_tokens,
        num_samples=num_samples,
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def reserve(ranks: LoadBalancer, num_tokens: int, max_tokens: int, num_samples: int = 1) -> tuple | None:
    return ranks.reserve(request(num_tokens, max_tokens, num_samples), num_tokens, 1000)


def test_prefill_goes_to_the_fewest_outstanding_tokens_ties_to_the_lower_rank() -> None:
    ranks = balancer(10)
    assert ranks.choose_prefill() == 0
    ranks.start_prefill(0, 5)
    assert ranks.choose_prefill() == 1
    ranks.start_prefill(1, 6)
    assert ranks.choose_prefill() == 0
    ranks.end_prefill(1, 6)
    assert ranks.choose_prefill() == 1


def test_decode_goes_to_the_largest_free_share_then_the_fewest_sequences() -> None:
    ranks = balancer(100, 100, 50)
    assert [reserve(ranks, 50, 50) for _ in range(4)] == [(0, (10,)), (1, (10,)), (2, (10,)), (0, (10,))]
    ranks.free(0, (10,), is_settled=False)
    ranks.free(0, (10,), is_settled=False)
    assert reserve(ranks, 1, 1) == (0, (1,))


def test_short_sequences_spread_by_number_though_one_long_one_holds_more_blocks() -> None:
    ranks = balancer(1000, 1000, num_slots=9)
    assert reserve(ranks, 100, 100) == (0, (20,))
    assert [reserve(ranks, 1, 1) for _ in range(3)] == [(1, (1,)), (0, (1,)), (1, (1,))]
    assert reserve(ranks, 4000, 4000) == (0, (500,))
    assert [reserve(ranks, 1, 1) for _ in range(2)] == [(1, (1,)), (1, (1,))]  # blocks are what rank 0 is shortest of


def test_a_sequence_is_expected_to_grow_to_max_tokens_but_not_without_bound() -> None:
    ranks = balancer(500)
    assert ranks.reserve(request(50, 10_000), 50, 200) == (0, (25,))
    assert ranks.reserve(request(50, 30), 50, 200) == (0, (8,))
    assert ranks.reserve(request(50, 300), 150, 200) == (0, (35,))  # a replay with 100 tokens of output


def test_a_rank_that_is_full_gets_nothing_and_an_empty_one_takes_the_largest() -> None:
    ranks = balancer(10)
    assert reserve(ranks, 500, 10) == (0, (10,))
    assert reserve(ranks, 1, 1) is None
    ranks.free(0, (10,), is_settled=False)
    assert reserve(ranks, 40, 40, num_samples=3) == (0, (3,))
    assert ranks.fits(100)
    assert not ranks.fits(101)


def test_slots_and_a_ready_queue_bound_the_sequences() -> None:
    ranks = balancer(1000, num_slots=5)
    placed = [reserve(ranks, 1, 1) for _ in range(9)]
    assert placed.index(None) == 4 + 2  # the slots, and half of them waiting
    ranks.report(0, RankLoad(rank=0), num_finished=10)
    assert reserve(ranks, 1, 1) is not None


def test_a_report_corrects_the_estimate_for_what_it_shows() -> None:
    ranks = balancer(100, 100)
    assert reserve(ranks, 50, 50) == (0, (10,))
    assert reserve(ranks, 50, 50) == (1, (10,))
    ranks.settle(0, (10,))
    ranks.report(0, RankLoad(rank=0, num_free_blocks={"main": 2}), num_finished=0)
    assert [reserve(ranks, 20, 10)[0] for _ in range(5)] == [1] * 5
    ranks.free(0, (10,), is_settled=True)  # nothing runs there now: the old report says nothing
    assert reserve(ranks, 20, 10) == (0, (3,))


def test_what_a_report_does_not_show_yet_is_counted_besides() -> None:
    ranks = balancer(100)
    reserve(ranks, 10, 10)
    ranks.settle(0, (2,))
    ranks.report(0, RankLoad(rank=0, num_free_blocks={"main": 30}), num_finished=0)
    assert reserve(ranks, 100, 100) == (0, (20,))
    assert reserve(ranks, 60, 60) is None  # 30 reported free, 20 on the way
    assert reserve(ranks, 50, 50) == (0, (10,))
