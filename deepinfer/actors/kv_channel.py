"""Carries hand-over buffers from prefill to decode ranks through the object store, and says where that is not needed.

Ranks of one host hand over through memory of their devices (`runtime/kv_intake`), as long as there is room; all else
goes this way. The prefill rank owns the objects. The driver passes their references on without opening them; a decode
rank gets them as read-only arrays on shared memory. An object lives until the last reference to it is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import ray
from ray import ObjectRef

from deepinfer.protocol import RankReady

Buffer = npt.NDArray[np.uint8]


class KVChannel:
    """One rank's end. `num_bytes` counts what it has put into the channel."""

    def __init__(self) -> None:
        """Nothing sent yet."""
        self.num_bytes = 0

    def publish(self, buffers: Sequence[Buffer]) -> list[ObjectRef]:
        """Put uint8 buffers into the channel and return their references in the same order."""
        references = []
        for buffer in buffers:
            references.append(ray.put(buffer))
            self.num_bytes += buffer.nbytes
        return references


def may_share_memory(ranks: Sequence[RankReady]) -> bool:
    """Whether decode ranks can be expected to read prefill ranks' memory: all on one host, on devices of one kind."""
    return len({(ready.node, ready.device.partition(":")[0]) for ready in ranks}) == 1
