"""Time how the KV of one long prompt of the released model gets from a prefill rank to a decode rank of the same host.

    python scripts/bench_handover.py [--tokens 131072] [--devices 0 1] [--accelerator nvidia]

Once through memory of the prefill rank's device, and once through the host and Ray's object store. This process and an
actor, with the caches of a rank each, of random bytes and without a model, do what ranks of an engine do. Medians of
five times in milliseconds; "sum" is from the first to the last, with the call of the actor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import ray
import torch

from deepinfer.actors.kv_channel import Buffer
from deepinfer.config import KernelConfig
from deepinfer.kernels.registry import select_kernels
from deepinfer.models.deepseek_v41.caches import Caches, allocate_caches, cache_layout
from deepinfer.models.deepseek_v41.kv_exchange import export_kv, import_kv, kv_bytes
from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.platforms.platform import Platform, load_platform
from deepinfer.protocol import KVHandle
from deepinfer.runtime.kv_intake import KVIntake
from deepinfer.runtime.kv_transfer import (
    HeldKV,
    check_handover,
    describe_piece,
    pack_parts,
    seal_piece,
    split_parts,
)
from deepinfer.runtime.piece_arena import PieceArena

REPEATS = 5
BLOCK = 64
FACTS: dict[str, Any] = {"request_id": "bench", "source_rank": 0, "layout_digest": "bench"}
GIB = 1 << 30


class Watch:
    """Seconds since the last look, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def note(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now


def make_caches(platform: Platform, num_tokens: int) -> Caches:
    """Return the caches of a rank with random bytes in them; slot 1 and blocks from 1 on are the prompt's."""
    kernels = select_kernels(platform.name, numerics=KernelConfig().numerics, batch_invariant=False, overrides={})
    caches = allocate_caches(
        cache_layout(released_config(), kernels, with_drafts=True),
        num_blocks={"global": 1 + num_tokens // BLOCK},
        num_slots=2,
        tokens_per_block=BLOCK,
        max_step_rows=0,
        device=platform.device,
    )
    for pool in (*caches.main.values(), *caches.index.values(), *caches.window, *caches.draft):
        pool.random_(0, 256)
    return caches


class Rank:
    """What both ranks have: a device, caches, and a stream."""

    def __init__(self, accelerator: str, device: str, num_tokens: int) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
        self.platform = load_platform(accelerator)
        self.caches = make_caches(self.platform, num_tokens)
        self.arena = PieceArena(self.platform.share_memory(GIB))
        self.stream = self.platform.open_stream("bench")
        self.num_tokens = num_tokens
        blocks = 1 + torch.randperm(num_tokens // BLOCK, device=self.platform.device)
        self.where: dict[str, Any] = {"slot": 1, "block_ids": {"global": blocks}, "num_tokens": num_tokens}


class Prefill(Rank):
    """Hands the prompt over."""

    def hand_over(self, on_device: bool) -> tuple[dict[str, float], KVHandle, list[Any]]:
        """Return what took how long, and the hand-over."""
        self.arena.release_all()
        num_bytes, watch = kv_bytes(self.caches, self.num_tokens), Watch()
        if on_device:
            place = self.arena.reserve(num_bytes)
            assert place is not None, "1 GiB is too little"
            work = self.stream.submit(
                lambda: (export_kv(self.caches, **self.where, into=place.data), seal_piece(place.data, num_bytes))
            )
            parts, sums = work.result()
            watch.note("gather and sums")
            facts = FACTS | {"num_tokens": self.num_tokens}
            return (
                watch.seconds,
                describe_piece(parts, **facts, memory=self.arena.handle, piece=place, sums=sums.tolist()),
                [],
            )
        parts = self.stream.submit(lambda: export_kv(self.caches, **self.where)).result()
        watch.note("gather to the host")
        handle, buffer = pack_parts(parts, **FACTS, num_tokens=self.num_tokens)
        watch.note("join and CRC-32")
        reference = ray.put(buffer)
        watch.note("into the object store")
        return watch.seconds, handle, [reference]

    def digest(self) -> int:
        """Return a sum over what the prompt's KV is."""
        parts = export_kv(self.caches, **self.where)
        return sum(int(part.data.sum(dtype=torch.int64)) for part in parts)


class Decode(Rank):
    """Takes the prompt over."""

    def __init__(self, accelerator: str, device: str, num_tokens: int) -> None:
        super().__init__(accelerator, device, num_tokens)
        self.intake = KVIntake(self.platform, "bench-intake", self.arena)

    def take(self, handle: KVHandle, *buffers: Buffer) -> dict[str, float]:
        """Return what took how long."""
        watch = Watch()
        kept: HeldKV
        if handle.place is not None:
            kept = self.intake.fetch(handle, layout_digest="bench")
            watch.note("fetch and sums")
        else:
            check_handover(handle, buffers[0], layout_digest="bench")
            kept = buffers[0]
            watch.note("CRC-32")
        work = self.stream.submit(lambda: import_kv(self.caches, **self.where, parts=split_parts(handle, kept)))
        work.result()
        watch.note("scatter" if handle.place is not None else "copy up and scatter")
        return watch.seconds

    digest = Prefill.digest


def main() -> None:
    """Run both ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--devices", nargs=2, default=["0", "1"])
    parser.add_argument("--accelerator", default="nvidia")
    options = parser.parse_args()
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:5.1f} s: {text}", flush=True)

    prefill_device, decode_device = options.devices
    ray.init(num_cpus=2, object_store_memory=2 * GIB, include_dashboard=False)
    say("Ray runs")
    decode = ray.remote(Decode).remote(options.accelerator, decode_device, options.tokens)
    prefill = Prefill(options.accelerator, prefill_device, options.tokens)
    say("the prefill rank is there")
    ray.get(decode.digest.remote())
    say("the decode rank is there")
    for on_device in (True, False):
        rounds: list[dict[str, float]] = []
        for _ in range(REPEATS + 2):  # the first ones map memory and compile
            start = time.monotonic()
            out, handle, references = prefill.hand_over(on_device)
            taken = ray.get(decode.take.remote(handle, *references))
            rounds.append(out | taken | {"sum": time.monotonic() - start})
        same = prefill.digest() == ray.get(decode.digest.remote())
        way = "on the device" if on_device else "through the host"
        places = " and ".join(options.devices)
        equal = "bytes are equal" if same else "bytes DIFFER"
        say(f"{options.tokens} tokens, {handle.nbytes / 1e6:.0f} MB, devices {places}, {way}: {equal}")
        print(f"  first time {1000 * rounds[0]['sum']:.1f} ms")
        for name in rounds[0]:
            print(f"  {name:24s} {1000 * statistics.median(entry[name] for entry in rounds[2:]):8.2f} ms")
    ray.shutdown()


if __name__ == "__main__":
    main()
