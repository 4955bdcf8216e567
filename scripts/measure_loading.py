"""How ranks of one node load a checkpoint: bytes from the storage and from the page cache, seconds, memory.

Writes a checkpoint of some GiB with the released model's structure and meaningless content into a temporary folder,
empties the page cache of it before each run, and starts 1, 2 and 4 processes that load their shares at the same time:

    python scripts/measure_loading.py --gib 4 --ranks 1 2 4

"from storage" is what the kernel fetched for a process (`read_bytes` of /proc/self/io), "copied" what it asked for
(`rchar`). Loading is good when all ranks of a node together fetch no more than the node needs, each byte once. A file
system without a page cache (or in memory) shows other numbers: name a folder on a disk with --directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer.models.checkpoint_files import open_checkpoint
from deepinfer.models.checkpoint_reads import NodePlace
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.config_file import parse_config
from deepinfer.models.deepseek_v41.engram_constants import build_engram_constants
from deepinfer.models.deepseek_v41.released import released_config_json
from deepinfer.models.deepseek_v41.tensor_table import DraftShare, TensorSpec, rank_tensors, tensor_table
from deepinfer.models.deepseek_v41.weight_types import num_bytes
from deepinfer.models.deepseek_v41.weights import TableShare, load_weights

GIB = 2**30
SHARD_BYTES = GIB // 2
SMALLER = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 16,
    "head_dim": 256,
    "q_lora_rank": 512,
    "o_lora_rank": 256,
    "dspark_n_routed_experts": 16,
}


def main() -> None:
    """Measure, or be one of the measured ranks."""
    options = _options()
    if options.rank is not None:
        _load(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the checkpoint is removed
    folder = Path(tempfile.mkdtemp(prefix="deepinfer-loading-", dir=options.directory))
    try:
        config = write_checkpoint(folder, options.gib)
        print(f"{'':>6}{'node needs':>12}{'from storage':>14}{'':>7}{'copied by':>11}{'':>9}{'':>9}{'memory over':>13}")
        units = f"{'ranks':>6}{'GiB':>12}{'GiB':>14}{'times':>7}{'a rank GiB':>11}{'seconds':>9}{'GiB/s':>9}"
        print(f"{units}{'weights MiB':>13}")
        for num_ranks in options.ranks:
            drop_page_cache(folder)
            _show(_run(folder, num_ranks, options), node_bytes(config, num_ranks))
            if options.again:
                _show(_run(folder, num_ranks, options), node_bytes(config, num_ranks), note="again, from memory")
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def synthetic_config(num_experts: int) -> dict[str, Any]:
    """The released model's `config.json` with smaller matrices and tables."""
    content = released_config_json()
    text = content["text_config"] | SMALLER | {"n_routed_experts": num_experts, "engram_vocab_size": 60_000}
    constants = build_engram_constants(
        tuple(text["engram_layer_ids"]),
        vocab_size=text["engram_vocab_size"],
        num_heads=text["engram_n_heads"],
        max_ngram_size=text["engram_max_ngram_size"],
        num_classes=text["engram_compressed_vocab_size"],
    )
    text["engram_num_embeddings"] = [layer.num_rows for layer in constants]
    return {**content, "text_config": text}


def write_checkpoint(folder: Path, gib: float) -> ModelConfig:
    """Write a checkpoint of about `gib` GiB, layer after layer like the released one, tables last."""
    for num_experts in range(8, 4096, 4):
        content = synthetic_config(num_experts)
        config = parse_config(content)
        total = sum(spec.num_bytes for spec in tensor_table(config).values())
        if total >= gib * GIB:
            break
    if shutil.disk_usage(folder).free < total * 1.1:
        raise SystemExit(f"{folder} has no room for {total / GIB:.1f} GiB; choose another --directory or fewer --gib")
    print(f"writing {total / GIB:.2f} GiB to {folder}, {num_experts} experts a layer")
    (folder / "config.json").write_text(json.dumps(content))
    specs = sorted(tensor_table(config).values(), key=lambda spec: ".embed." in spec.name)
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if sum(other.num_bytes for other in shards[-1]) + spec.num_bytes > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(spec)
    noise = np.random.default_rng(0).integers(0, 127, 1 << 24, dtype=np.uint8)
    for number, shard in enumerate(shards):
        _write_shard(folder / f"model-{number:05}-of-{len(shards):05}.safetensors", shard, noise)
    weight_map = {
        spec.name: f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number, shard in enumerate(shards)
        for spec in shard
    }
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return config


def node_bytes(config: ModelConfig, num_ranks: int) -> int:
    """What `num_ranks` ranks, all of one node, need of the files, each byte once."""
    wanted: dict[str, int] = {}
    for rank in range(num_ranks):
        for spec in rank_tensors(tensor_table(config).values(), _experts(config, rank, num_ranks), DraftShare()):
            wanted[spec.name] = spec.num_bytes
    return sum(wanted.values())


def drop_page_cache(folder: Path) -> None:
    """Take the files out of the page cache; what is not on the storage yet is written first."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint, at least 3.8")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="how many ranks load at a time")
    parser.add_argument("--directory", type=Path, default=None, help="where to write it; default: the temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--again", action="store_true", help="load a second time with what is in memory then")
    parser.add_argument("--sharded", action="store_true", help="n-gram tables spread over the ranks, not mapped")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--stagger-seconds", type=float, default=0.0, help="each rank starts so much later")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _write_shard(path: Path, specs: list[TensorSpec], noise: np.ndarray) -> None:
    header, end = {}, 0
    for spec in specs:
        begin, end = end, end + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done in range(0, end, len(noise)):
            file.write(memoryview(noise)[: end - done])


def _experts(config: ModelConfig, rank: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    count = config.n_routed_experts
    return (tuple(range(rank * count // num_ranks, (rank + 1) * count // num_ranks)),) * config.num_layers


def _run(folder: Path, num_ranks: int, options: argparse.Namespace) -> list[dict[str, float]]:
    command = [sys.executable, __file__, "--directory", str(folder), "--ranks", str(num_ranks)]
    command += ["--device", options.device, *(["--sharded"] if options.sharded else [])]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.stdout.readline()  # it has imported everything
    for process in ranks:
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(options.stagger_seconds)
    return [json.loads(process.communicate()[0]) for process in ranks]


def _load(options: argparse.Namespace) -> None:
    rank, num_ranks = options.rank, options.ranks[0]
    config = parse_config(json.loads((options.directory / "config.json").read_text()))
    open_checkpoint(options.directory)  # headers are not what is measured
    device = (
        torch.device(options.device, rank % torch.cuda.device_count())
        if options.device == "cuda"
        else torch.device("cpu")
    )
    print("ready", flush=True)
    sys.stdin.readline()
    before, begin = _counters("/proc/self/io"), time.monotonic()
    weights = load_weights(
        options.directory,
        config,
        expert_ids=_experts(config, rank, num_ranks),
        device=device,
        draft=DraftShare(),
        table_share=TableShare(rank, num_ranks) if options.sharded else None,
        place=NodePlace(rank, num_ranks),
    )
    seconds, after = time.monotonic() - begin, _counters("/proc/self/io")
    held = num_bytes(weights)
    if not options.sharded:
        held -= sum(num_bytes(layer.engram.table) for layer in weights.layers if layer.engram)
    peak = _counters("/proc/self/status")["VmHWM"] * 1024
    result = {
        "begin": begin,
        "seconds": seconds,
        "storage": after["read_bytes"] - before["read_bytes"],
        "copied": after["rchar"] - before["rchar"],
        "over": peak - (held if options.device == "cpu" else 0),
    }
    print(json.dumps(result), flush=True)


def _counters(path: str) -> dict[str, int]:
    fields = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) > 1 and words[1].isdigit()}


def _show(ranks: list[dict[str, float]], needed: int, note: str = "") -> None:
    begin = min(rank["begin"] for rank in ranks)
    seconds = max(rank["begin"] + rank["seconds"] for rank in ranks) - begin
    storage, copied = sum(rank["storage"] for rank in ranks), max(rank["copied"] for rank in ranks)
    over = max(rank["over"] for rank in ranks)
    print(
        f"{len(ranks):>6}{needed / GIB:>12.2f}{storage / GIB:>14.2f}{storage / needed:>7.2f}{copied / GIB:>11.2f}"
        f"{seconds:>9.1f}{needed / GIB / seconds:>9.2f}{over / 2**20:>13.0f}  {note}",
        flush=True,
    )


if __name__ == "__main__":
    main()
