"""What driver and ranks tell each other about a rank's life: where it runs, what it has loaded, how it ended."""

from __future__ import annotations

import msgspec

from deepinfer.kv_cache.kv_groups import KVGroup
from deepinfer.protocol import RankReady


class RankProgram(msgspec.Struct, frozen=True, kw_only=True):
    """The code that a rank runs, as "module:function": it is loaded in the rank only, because it may import torch.

    `build(config, *, role, rank, num_ranks, model_directory, store_address, recorder, on_phase)` returns a RankEngine;
    `open_store(host)` returns a rendezvous (kept alive by its rank) and its port.
    """

    build: str = "deepinfer.runtime.build:build_rank_engine"
    open_store: str = "deepinfer.distributed.process_groups:open_store"


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a group: its ranks have met each other. `number` counts the lives of a role, and so its loads."""

    number: int
    token: str


class RankOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Who made a rank. `orphan_timeout_seconds`: so long it waits for a driver (None: it dies with its driver)."""

    engine: str
    epoch: int
    incarnation: Incarnation
    orphan_timeout_seconds: float | None = None


class RankSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank was told to load; `config` is the encoded ClusterConfig."""

    config: bytes
    model_directory: str
    program: RankProgram


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs."""

    node_id: str
    address: str
    pid: int
    device_ids: tuple[str, ...]


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded rank tells the driver: its sizes and digests, and the model's numbers."""

    ready: RankReady
    groups: tuple[KVGroup, ...]
    vocab_size: int
    max_model_len: int


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells a driver that did not make it. `source` and `facts` are None until it has loaded.

    `version`: of the code that the rank runs.
    """

    version: str
    epoch: int
    incarnation: Incarnation
    num_ranks: int
    place: RankPlace
    is_running: bool
    source: RankSource | None = None
    facts: RankFacts | None = None


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """What broke a rank. `blames_peer`: it only noticed that another rank of its group is gone."""

    cause: str
    trace: str
    blames_peer: bool


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The last step that a rank began, and whether it waits without work."""

    step: int
    parked: bool
