"""Hand-overs that died with their prefill rank on the way go back to the scheduler, which sends them again."""

from __future__ import annotations

from support.fake_cluster import make_request
from support.fake_engine import GROUPS, FakeEngine

from deepinfer.actors.batch_sender import lost_handovers
from deepinfer.codec import unpack
from deepinfer.config import SchedulerConfig
from deepinfer.protocol import DecodeBatch, PrefillBatch, PrefillResult
from deepinfer.scheduler.batch_scheduler import BatchScheduler
from deepinfer.scheduler.load_balancer import DecodeCapacity


def test_lost_handovers_become_replays_that_keep_their_first_tokens() -> None:
    scheduler = BatchScheduler(
        config=SchedulerConfig(),
        prefill_ranks=[0],
        decode_ranks=[DecodeCapacity(0, {"main": 100}, 10)],
        groups=GROUPS,
        draw_seed=lambda: 1,
        max_attempts=2,
    )
    scheduler.submit("job", make_request("two samples", [1, 2, 3], n=2))
    prefill = scheduler.next_batches()[0].batch
    assert isinstance(prefill, PrefillBatch)
    engine = FakeEngine(role="prefill", rank=0, max_running=4, step_seconds=0)
    engine.post(prefill)
    engine._drain()
    result, buffers = engine.take_results()
    assert isinstance(result, PrefillResult)
    scheduler.on_prefill_result(0, result, buffers)
    decode = scheduler.next_batches()[0].batch
    assert isinstance(decode, DecodeBatch)

    lost = lost_handovers(0, decode)
    assert [failure.index for failure in lost.failures] == [0, 1]
    scheduler.on_decode_result(0, lost)
    again = scheduler.next_batches()[0].batch
    assert isinstance(again, PrefillBatch)
    firsts = unpack(result.items[0].first_token_ids).tolist()
    assert [unpack(request.output_token_ids).tolist() for request in again.requests] == [[first] for first in firsts]
