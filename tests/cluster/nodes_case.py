"""Two prefill nodes and two decode nodes, each a raylet of its own, and a spare one; one decode node is killed.

The ranks are fake ones, whose answers show a hand-over that went astray, or (second argument "real") the tiny model's.
Run as a program, because a process can be connected to one Ray only. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from support.fake_cluster import FAKE_PROGRAM

from deepinfer.actors.rank_life import RankProgram
from deepinfer.launcher.environment import ray_environment, set_environment, write_token
from deepinfer.llm import LLM
from deepinfer.protocol import SamplingParams

NUM_PROMPTS = 8
ROLES = [("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)]
SETTINGS = {
    "accelerator": "cpu",
    "prefill.ranks": 2,
    "prefill.ranks_per_node": 1,
    "decode.ranks": 2,
    "decode.ranks_per_node": 1,
    "speculative.max_draft_tokens": 0,
}


def nodes_of(llm: LLM) -> dict[str, str]:
    name = llm._client.facts.name
    handles = {f"{role}-{rank}": ray.get_actor(f"{name}-{role}-{rank}") for role, rank in ROLES}
    return {rank: ray.get(handle.probe.remote(), timeout=30).node_id for rank, handle in handles.items()}


def kill_node_when_busy(llm: LLM, cluster: Cluster, node_id: str) -> None:
    while llm.status()["requests"]["num_decoding"] < NUM_PROMPTS:
        time.sleep(0.02)
    [victim] = [node for node in cluster.worker_nodes if node.node_id == node_id]
    cluster.remove_node(victim, allow_graceful=False)
    say("killed a node")


def say(text: str) -> None:
    print(time.strftime("%X"), text, file=sys.stderr, flush=True)


def run(folder: Path, program: RankProgram | None, max_tokens: int) -> dict[str, Any]:
    set_environment(ray_environment(write_token(folder)))
    store = {"object_store_memory": 80 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    for _ in range(5):
        cluster.add_node(num_cpus=1, **store)
    ray.init(address=cluster.address, namespace="deepinfer", log_to_driver=False, logging_level="ERROR")
    prompts = [f"Row {number} says" for number in range(NUM_PROMPTS)]
    params = [SamplingParams(max_tokens=max_tokens, seq_seed=number) for number in range(NUM_PROMPTS)]
    chosen = {} if program is None else {"rank_program": program}
    with LLM("tiny", settings={**SETTINGS, "cache_dir": str(folder / "cache")}, **chosen) as llm:
        say("started")
        before = nodes_of(llm)
        driver = ray.get_actor(f"{llm._client.facts.name}-driver")
        here = ray.get(driver.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=30)
        say(f"driver {here}, this process {ray.get_runtime_context().get_node_id()}, ranks {before}")
        victim = next(rank for rank in ("decode-1", "decode-0") if before[rank] != here)
        undisturbed = llm.generate(prompts, params)
        killer = threading.Thread(target=kill_node_when_busy, args=(llm, cluster, before[victim]))
        killer.start()
        say("answered undisturbed")
        disturbed = llm.generate(prompts, params)
        say("answered disturbed")
        killer.join()
        pairs = zip(undisturbed, disturbed, strict=True)
        found = {
            "victim": victim,
            "driver_is_here": here == ray.get_runtime_context().get_node_id(),
            "before": before,
            "after": nodes_of(llm),
            "restarts": llm.status()["restarts"],
            "errors": [str(out.error) for out in (*undisturbed, *disturbed) if out.error is not None],
            "equal": [one.outputs[0].token_ids == other.outputs[0].token_ids for one, other in pairs],
        }
    ray.shutdown()
    cluster.shutdown()
    return found


if __name__ == "__main__":
    is_real = sys.argv[2:] == ["real"]
    print(json.dumps(run(Path(sys.argv[1]), None if is_real else FAKE_PROGRAM, 40 if is_real else 1500)))
