"""Builds a rank as a job does, with a stand-in for what it lacks, runs steps, and returns what was measured."""

from __future__ import annotations

import itertools
import platform as host
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from deepinfer import __version__
from deepinfer.config import ClusterConfig
from deepinfer.distributed.loopback_dispatcher import LoopbackDispatcher
from deepinfer.models.model_spec import ModelSpec
from deepinfer.platforms.devices import describe_devices
from deepinfer.platforms.platform import load_platform
from deepinfer.protocol import Role
from deepinfer.runtime.bench.ceilings import Ceilings, measure_ceilings
from deepinfer.runtime.bench.kernel_times import KernelTimes, kernel_times
from deepinfer.runtime.bench.requests import decode_batch, prefill_batch
from deepinfer.runtime.bench.step_log import EngineThread, Step, StepLog
from deepinfer.runtime.build import build_rank_engine
from deepinfer.runtime.rank_engine import RankEngine
from deepinfer.runtime.stand_in import StandIn
from deepinfer.tokenizer import Tokenizer

_SLACK_STEPS = 256  # that run while nobody looks: between measuring and watching, and at the end
_SLACK_PROMPTS = 3
_WATCH_SECONDS = 60.0


@dataclass(slots=True, frozen=True)
class BenchCase:
    """What is run. `num_steps` are measured, behind `num_warm_up`; then `num_watched` for the table of kernels.

    `num_ranks`: of the group that the one rank stands for. `shares`: see `LoopbackDispatcher`, for the target's
    experts. Decode: `num_requests` sequences of `num_tokens` each. Prefill: prompts of `num_tokens`, one after another.
    """

    role: Role
    num_ranks: int
    num_requests: int
    num_tokens: int
    num_steps: int
    num_warm_up: int
    num_watched: int
    shares: tuple[float, ...] | None = None


@dataclass(slots=True, frozen=True)
class Memory:
    """Bytes that the process holds on the device: with weights, with caches as well, and at the most."""

    weights: int
    with_caches: int
    most: int
    total: int


@dataclass(slots=True, frozen=True)
class BenchTimes:
    """One entry a pass: a decode step, or the steps of one prompt.

    `period_seconds`: from reading a pass's results to reading the next one's, which is what a job gets.
    `device_seconds`: of the same passes, between the device's events. `tokens_per_pass`: committed by a sequence; with
    random weights hardly any draft is accepted. `kernels` and `ceilings` are None on a CPU.
    """

    period_seconds: tuple[float, ...]
    device_seconds: tuple[float, ...]
    tokens_per_pass: float
    steps_per_pass: int
    build_seconds: float
    memory: Memory
    kernels: KernelTimes | None
    ceilings: Ceilings | None
    kernel_set: dict[str, str]
    machine: dict[str, str]

    @property
    def idle_share(self) -> float:
        """Share of the time between two steps in which the device had nothing of a step to do."""
        return max(0.0, 1 - sum(self.device_seconds) / sum(self.period_seconds))


def run_bench(case: BenchCase, config: ClusterConfig, spec: ModelSpec, tokenizer: Tokenizer) -> BenchTimes:
    """Build the rank, run the case and return the times. `config` is resolved; what it says of ranks is not looked at.

    Raises ConfigError when the case does not fit into the memory.
    """
    platform = load_platform(config.accelerator)
    ceilings = measure_ceilings(platform.device)
    if ceilings is not None:
        _start_profiler()
    log, begin = StepLog(), time.perf_counter()
    held: dict[str, int] = {}

    def note(name: str) -> None:
        held.setdefault(name, platform.memory_info().own_bytes)

    engine = _build(case, config, spec, tokenizer, log, note)
    note("ready")
    build_seconds = time.perf_counter() - begin
    steps_each = 1 if case.role == "decode" else -(-case.num_tokens // config.prefill.step_tokens)
    kernels = None
    with EngineThread(engine) as thread:
        _post(case, spec.vocab_size, engine)
        passes = _measured(case, thread, log, steps_each=steps_each)
        if platform.device.type == "cuda" and case.num_watched:
            profile = engine.profile(case.num_watched * steps_each, _WATCH_SECONDS, with_host=False)
            thread.check()
            kernels = None if profile is None else kernel_times(profile)
    memory = platform.memory_info()
    ends = [steps[-1].read_seconds for steps in passes]
    return BenchTimes(
        period_seconds=tuple(end - start for start, end in itertools.pairwise(ends)),
        device_seconds=tuple(sum(step.device_seconds for step in steps) for steps in passes[1:]),
        tokens_per_pass=_tokens_per_pass(case, log),
        steps_per_pass=steps_each,
        build_seconds=build_seconds,
        memory=Memory(held["allocating caches"], held["ready"], _most(platform.device), memory.total_bytes),
        kernels=kernels,
        ceilings=ceilings,
        kernel_set=engine.ready.kernel_set,
        machine=_machine(),
    )


def bench_config(config: ClusterConfig, case: BenchCase, *, max_drafts: int) -> ClusterConfig:
    """Return `config` with room for the case, and nothing more."""
    num_steps = case.num_warm_up + case.num_steps + case.num_watched + _SLACK_STEPS
    longest = case.num_tokens + (num_steps * (1 + max_drafts) if case.role == "decode" else 1)
    replace = msgspec.structs.replace
    return replace(
        config,
        ranks_per_device=1,
        model=replace(config.model, max_model_len=longest),
        # a step holds no more than one prompt
        prefill=replace(
            config.prefill,
            max_running=_SLACK_PROMPTS,
            max_tokens_per_step=min(config.prefill.step_tokens, case.num_tokens),
        ),
        decode=replace(config.decode, max_running=case.num_requests),
        speculative=replace(config.speculative, max_draft_tokens=max_drafts),
    )


def _build(
    case: BenchCase,
    config: ClusterConfig,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    log: StepLog,
    on_phase: Callable[[str], None],
) -> RankEngine:
    def dispatchers(num_experts: int) -> LoopbackDispatcher:
        shares = case.shares if num_experts == spec.num_experts else None
        return LoopbackDispatcher(num_experts, rank=0, num_ranks=case.num_ranks, shares=shares)

    return build_rank_engine(
        config,
        role=case.role,
        rank=0,
        num_ranks=case.num_ranks,
        model_directory="",
        store_address=None,
        recorder=log,
        on_phase=on_phase,
        stand_in=StandIn(spec, tokenizer, dispatchers),
    )


def _post(case: BenchCase, vocab_size: int, engine: RankEngine) -> None:
    """Give the engine its work: as many sequences as asked for, or as many prompts as the steps need."""
    if case.role == "decode":
        max_tokens = engine.max_model_len - case.num_tokens + 1
        batch = decode_batch(
            case.num_requests,
            num_tokens=case.num_tokens,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            layout_digest=engine.ready.layout_digest,
        )
        engine.post(batch, [np.zeros(0, np.uint8)] * len(batch.admitted))
    else:
        num_prompts = case.num_warm_up + case.num_steps + case.num_watched + _SLACK_PROMPTS
        engine.post(prefill_batch(num_prompts, num_tokens=case.num_tokens, vocab_size=vocab_size))


def _measured(case: BenchCase, thread: EngineThread, log: StepLog, *, steps_each: int) -> list[list[Step]]:
    """Wait for the measured passes and return the steps of each; the first list is of the pass before them."""
    first, count = case.num_warm_up, case.num_steps
    log.wait((first + count) * steps_each, thread)
    ends = range(first * steps_each, (first + count + 1) * steps_each, steps_each)
    return [log.steps[end - steps_each : end] for end in ends]


def _tokens_per_pass(case: BenchCase, log: StepLog) -> float:
    accepted = log.totals.get("deepinfer_accepted_tokens", 0.0)
    return 1 + accepted / max(1, len(log.steps) * case.num_requests)


def _start_profiler() -> None:
    """Profile next to nothing: the first time takes seconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.ones(1, device="cuda")


def _most(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _machine() -> dict[str, str]:
    return {
        "deepinfer": __version__,
        "python": host.python_version(),
        "torch": torch.__version__,
        "processor": host.machine(),
        **{f"gpu {number}": text for number, text in enumerate(describe_devices())},
    }
