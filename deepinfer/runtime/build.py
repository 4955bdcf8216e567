"""Put a rank together: process groups, kernels, weights, caches, scheduler, engine. Every phase is logged."""

from __future__ import annotations

import os
import platform as host
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepinfer import __version__
from deepinfer.config import ClusterConfig, DecodeConfig, PrefillConfig, keep_compiled_kernels
from deepinfer.distributed.dispatchers import Dispatchers, open_dispatchers
from deepinfer.distributed.process_groups import ProcessGroups
from deepinfer.distributed.step_sync import GroupStepSync, LocalStepSync
from deepinfer.errors import ConfigError
from deepinfer.kernels.registry import KernelSet, select_kernels
from deepinfer.kv_cache.cache_manager import CacheManager
from deepinfer.kv_cache.kv_groups import KVGroup, layout_digest
from deepinfer.log import get_logger, phase
from deepinfer.metrics import Recorder
from deepinfer.models.model_digest import model_digest
from deepinfer.models.model_spec import Model, ModelSpec
from deepinfer.models.registry import load_spec
from deepinfer.platforms.platform import Platform, Stream, load_platform
from deepinfer.protocol import RankReady, Role, SamplingParams
from deepinfer.runtime.build_drafts import (
    MakeDrafter,
    build_planner,
    build_speculation,
    draft_bytes_per_slot,
    draft_use,
    num_draft_tokens,
)
from deepinfer.runtime.device_memory import CacheSize, cache_budget, most_exchanged_rows, size_caches
from deepinfer.runtime.kv_intake import KVIntake
from deepinfer.runtime.load_progress import LoadReporter
from deepinfer.runtime.measure_costs import Room
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.node_place import find_place
from deepinfer.runtime.piece_arena import PieceArena
from deepinfer.runtime.rank_engine import EngineParts, RankEngine, StepObserver
from deepinfer.runtime.rank_metrics import RankMetrics
from deepinfer.runtime.slot_table import SlotTable
from deepinfer.runtime.stand_in import StandIn
from deepinfer.runtime.stop_checkers import make_stop_checker
from deepinfer.scheduler.sampling_params import bad_word_ids
from deepinfer.scheduler.step_scheduler import StepScheduler
from deepinfer.speculative.verify_planner import VerifyPlanner
from deepinfer.structured_outputs.compiler import GrammarCompiler
from deepinfer.structured_outputs.vocabulary import grammar_vocabulary
from deepinfer.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class _Loaded:
    """A rank once its weights are there."""

    spec: ModelSpec
    tokenizer: Tokenizer
    kernels: KernelSet
    model: Model
    digest: str
    kv_groups: tuple[KVGroup, ...]
    max_model_len: int
    num_drafts: int
    dispatchers: Dispatchers


@dataclass(slots=True, frozen=True)
class _Builder:
    """Who the rank is, and the phases of its start."""

    config: ClusterConfig
    role: Role
    rank: int
    num_ranks: int
    directory: Path
    platform: Platform
    on_phase: Callable[[str], None]
    stand_in: StandIn | None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Tell the owner and the log that a phase begins, and the log that it ended."""
        self.on_phase(name)
        with phase(get_logger(f"{self.role}-{self.rank}"), name):
            yield

    @property
    def max_running(self) -> int:
        """Prompts or sequences in work at once."""
        return self._section.max_running

    @property
    def _section(self) -> PrefillConfig | DecodeConfig:
        return self.config.prefill if self.role == "prefill" else self.config.decode

    def meet(self, store_address: tuple[str, int] | None) -> ProcessGroups | None:
        """Form the process groups; None for a single rank, which needs none."""
        if self.num_ranks == 1 or self.stand_in is not None:
            return None
        assert store_address is not None, "several ranks need rank 0's store"
        host_name, port = store_address
        return ProcessGroups.form(
            role=self.role,
            rank=self.rank,
            num_ranks=self.num_ranks,
            host=host_name,
            port=port,
            meeting_seconds=self.config.scheduler.start_timeout_seconds,
            timeout_seconds=self.config.scheduler.step_timeout_seconds,
        )

    def load(self, groups: ProcessGroups | None) -> _Loaded:
        """Choose kernels and load weights; a collective."""
        config = self.config
        kernels = select_kernels(
            self.platform.name,
            numerics=config.kernels.numerics,
            batch_invariant=config.determinism.batch_invariant,
            overrides=config.kernels.overrides,
        )
        stand_in, directory = self.stand_in, self.directory
        spec = load_spec(directory) if stand_in is None else stand_in.spec
        num_drafts = num_draft_tokens(config.speculative, spec, num_ranks=self.num_ranks)
        return _Loaded(
            spec=spec,
            tokenizer=Tokenizer.from_directory(directory) if stand_in is None else stand_in.tokenizer,
            kernels=kernels,
            model=self._load_model(spec, kernels, num_drafts, groups),
            digest=model_digest(directory) if stand_in is None else spec.name,
            kv_groups=spec.kv_groups(kernels, tokens_per_block=config.cache.block_size, with_drafts=num_drafts > 0),
            max_model_len=_max_model_len(spec, config.model.max_model_len),
            num_drafts=num_drafts,
            dispatchers=self._open_dispatchers(spec, kernels, num_drafts, groups),
        )

    def _load_model(self, spec: ModelSpec, kernels: KernelSet, num_drafts: int, groups: ProcessGroups | None) -> Model:
        logger = get_logger(f"{self.role}-{self.rank}")
        model = spec.load(
            self.directory,
            kernels=kernels,
            device=self.platform.device,
            rank=self.rank,
            num_ranks=self.num_ranks,
            drafts=draft_use(self.role, num_drafts),
            keep_tokens=self._keep_tokens(spec),
            tables=self._section.ngram_tables,
            place=find_place(groups),
            on_progress=LoadReporter(self.on_phase, logger.info),
        )
        if self.uses_graphs and not model.capturable:
            logger.warning(
                "steps wait for the host, which reads the n-gram tables, so none is recorded: this is slow; use a host "
                "whose memory can be pinned, or decode.ngram_tables: sharded"
            )
        return model

    def _open_dispatchers(
        self, spec: ModelSpec, kernels: KernelSet, num_drafts: int, groups: ProcessGroups | None
    ) -> Dispatchers:
        """Prepare the exchange of rows with the other ranks; a collective."""
        if self.stand_in is not None:
            return Dispatchers(self.stand_in.dispatchers)
        block_size = spec.draft_block_size if num_drafts else 0
        max_rows = most_exchanged_rows(self.config, self.role, draft_block_size=block_size)
        return open_dispatchers(
            groups,
            spec.exchange_shapes(kernels, max_rows=max_rows, tables=self._section.ngram_tables),
            device=self.platform.device,
            timeout_seconds=self.config.scheduler.step_timeout_seconds,
        )

    def _keep_tokens(self, spec: ModelSpec) -> int | None:
        """How many tokens of a prompt run at full depth; None: all, or a rank that runs no prompts."""
        if self.config.model.prefill_truncation == "off":
            return None
        keep_tokens = spec.prompt_keep_tokens(
            self.config.model.prefill_keep_tokens, max_draft_tokens=self.config.speculative.max_draft_tokens
        )
        if self.role == "decode":
            return None
        get_logger(f"{self.role}-{self.rank}").info("the last %d tokens of a prompt run at full depth", keep_tokens)
        return keep_tokens

    def arena(self) -> PieceArena | None:
        """Take memory for hand-overs; None: they go through the host.

        It comes before all else, so that it shares no allocation of the device with what others are not to map, and
        before the caches share out what is left.
        """
        num_bytes = self.config.cache.handover_bytes
        if not num_bytes or self.stand_in is not None:
            return None
        try:
            return PieceArena(self.platform.share_memory(num_bytes))
        except (OSError, RuntimeError) as error:
            text = "no memory for hand-overs can be shared, so all go through the object store: %s"
            get_logger(f"{self.role}-{self.rank}").warning(text, error)
            return None

    def intake(self, arena: PieceArena | None) -> KVIntake | None:
        """What fetches hand-overs from prefill ranks' memory; None: they have none for it, or this rank is one."""
        if self.role == "prefill" or not self.config.cache.handover_bytes:
            return None
        return KVIntake(self.platform, f"{self.role}-{self.rank}-intake", arena)

    def size(self, loaded: _Loaded) -> CacheSize:
        """Decide how many blocks and slots there are; a collective."""
        return size_caches(
            loaded.kv_groups,
            budget_bytes=cache_budget(
                self.config.cache,
                self.platform,
                ranks_per_device=self.config.ranks_per_device or 1,
                step_bytes=self._step_bytes(loaded),
            ),
            max_running=self.max_running,
            max_model_len=loaded.max_model_len,
            draft_bytes_per_slot=draft_bytes_per_slot(
                self.config.speculative, loaded.num_drafts, loaded.spec.vocab_size
            ),
        )

    def _step_bytes(self, loaded: _Loaded) -> int:
        """What the largest step needs beside weights and caches; on a CPU that is not counted so closely."""
        if self.platform.name == "cpu":
            return 0
        blocks = {group.name: 2 for group in loaded.kv_groups if group.kind == "paged"}
        runner = self.runner(loaded, CacheSize(blocks, self.max_running + 1, 0), None)
        num_sequences, num_rows, num_logits = self.max_running, self.config.prefill.step_tokens, None
        if self.role == "prefill":
            num_logits = num_sequences
        else:
            num_rows = num_sequences * (1 + self._num_decode_drafts(loaded))
        num_bytes = self.platform.peak_bytes(lambda: runner.run_padding(num_sequences, num_rows, num_logits=num_logits))
        num_bytes += runner.kept_bytes
        get_logger(f"{self.role}-{self.rank}").info("a step needs %.2f GiB beside its caches", num_bytes / 2**30)
        return num_bytes

    def runner(self, loaded: _Loaded, size: CacheSize, make_drafter: MakeDrafter | None) -> ModelRunner:
        """Allocate caches and slot table."""
        spec, tokenizer = loaded.spec, loaded.tokenizer

        def spell_bad_words(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
            return bad_word_ids(params.bad_words, tokenizer)

        dispatchers = loaded.dispatchers
        dispatcher = dispatchers(spec.num_experts)
        if self.config.determinism.batch_invariant and not dispatcher.batch_invariant:
            raise ConfigError(
                f"{type(dispatcher).__name__}, which carries rows to experts here, is not batch-invariant; set false",
                path="determinism.batch_invariant",
            )
        caches = loaded.model.allocate_caches(
            num_blocks=size.num_blocks,
            num_slots=size.num_slots,
            tokens_per_block=self.config.cache.block_size,
            max_step_rows=self._max_step_rows(loaded, size),
        )
        table = SlotTable(
            num_slots=size.num_slots,
            max_model_len=loaded.max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_id=spec.eos_token_id,
            groups=loaded.kv_groups,
            device=self.platform.device,
            bad_word_ids=spell_bad_words,
            gumbel_argmax=loaded.kernels.gumbel_argmax,
            read_slots=loaded.kernels.read_slots,
            write_tokens=loaded.kernels.write_tokens,
            max_drafts=self._num_decode_drafts(loaded),
            keeps_draft_scores=self.config.speculative.verifier == "rejection",
        )
        return ModelRunner(
            model=loaded.model,
            caches=caches,
            table=table,
            kernels=loaded.kernels,
            dispatcher=dispatcher,
            speculation=build_speculation(
                self.config.speculative,
                loaded.model.draft_network,
                table,
                kernels=loaded.kernels,
                caches=caches,
                dispatchers=dispatchers,
                make_drafter=make_drafter,
            ),
            capture=dispatchers.recording(self.platform.capture) if self.uses_graphs else None,
        )

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps run as graphs, as far as this rank's device is concerned."""
        return self.role == "decode" and self.platform.has_graphs and self.config.decode.graphs == "auto"

    def _max_step_rows(self, loaded: _Loaded, size: CacheSize) -> int:
        """Most rows of a step, or of a draft pass, which has a whole block of drafts and their anchor at the most."""
        if self.role == "prefill":
            return self.config.prefill.step_tokens
        return size.num_slots * (1 + loaded.spec.draft_block_size)

    def _num_decode_drafts(self, loaded: _Loaded) -> int:
        return loaded.num_drafts if self.role == "decode" else 0

    def planner(
        self, loaded: _Loaded, size: CacheSize, runner: ModelRunner, stream: Stream, groups: ProcessGroups | None
    ) -> VerifyPlanner | None:
        """What varies the number of drafts; None: every step verifies as many as it can."""
        num_drafts = self._num_decode_drafts(loaded)
        if not self.config.speculative.varlen or num_drafts == 0:
            return None
        with self.phase("measuring step costs"):
            return build_planner(
                Path(self.config.cache_dir),
                runner,
                stream,
                Room(loaded.kv_groups, size.num_blocks, self.max_running, loaded.max_model_len),
                max_drafts=num_drafts,
                groups=groups,
                key={
                    "version": __version__,
                    "model": loaded.digest,
                    "ranks": self.num_ranks,
                    "device": f"{self.platform.device} {self.platform.memory_info().total_bytes}",
                    "processor": f"{host.machine()} {os.cpu_count()}",
                    "kernels": loaded.kernels.describe(),
                    "numerics": repr(loaded.kernels.numerics),
                },
            )

    def scheduler(self, loaded: _Loaded, size: CacheSize) -> StepScheduler:
        """The rank's own scheduler."""
        return StepScheduler(
            role=self.role,
            cache=CacheManager(loaded.kv_groups, num_blocks=size.num_blocks, num_slots=size.num_slots),
            max_running=self.max_running,
            max_tokens_per_step=self.config.prefill.step_tokens,
            max_model_len=loaded.max_model_len,
            make_stop_checker=partial(
                make_stop_checker,
                tokenizer=loaded.tokenizer,
                eos_token_id=loaded.spec.eos_token_id,
                max_model_len=loaded.max_model_len,
            ),
            max_rows_per_slot=1 + self._num_decode_drafts(loaded),
        )

    def ready(self, loaded: _Loaded, size: CacheSize) -> RankReady:
        """What the driver compares."""
        return RankReady(
            rank=self.rank,
            role=self.role,
            node=host.node(),
            device=str(self.platform.device),
            pid=os.getpid(),
            num_blocks=size.num_blocks,
            num_slots=size.num_slots,
            kernel_set=loaded.kernels.describe(),
            model_digest=loaded.digest,
            layout_digest=layout_digest(loaded.kv_groups),
            version=__version__,
        )


def build_rank_engine(
    config: ClusterConfig,
    *,
    role: Role,
    rank: int,
    num_ranks: int,
    model_directory: str | Path,
    store_address: tuple[str, int] | None,
    recorder: Recorder,
    on_phase: Callable[[str], None],
    observe_step: StepObserver | None = None,
    make_drafter: MakeDrafter | None = None,
    stand_in: StandIn | None = None,
) -> RankEngine:
    """Return rank `rank` of `num_ranks` of `role`, ready to run.

    `config` is resolved. `store_address` is rank 0's store (`process_groups.open_store`); None only for a single rank.
    `on_phase` is told the name of each phase as it begins. `make_drafter` replaces the model's own drafter (for tests).
    With `stand_in` the rank reads no files and meets nobody (for benchmarks); all else is as in a job.
    Raises ConfigError, CheckpointError or RankError.
    """
    if config.accelerator == "nvidia":
        keep_compiled_kernels(config.cache_dir, rank_name=f"{role}-{rank}")
    platform = load_platform(config.accelerator)
    builder = _Builder(config, role, rank, num_ranks, Path(model_directory), platform, on_phase, stand_in)
    arena = builder.arena()
    with builder.phase(f"meeting {num_ranks} ranks"):
        groups = builder.meet(store_address)
    with builder.phase("loading weights"):
        loaded = builder.load(groups)
    with builder.phase("allocating caches"):
        size = builder.size(loaded)
        runner = builder.runner(loaded, size, make_drafter)
    stream = platform.open_stream(f"{role}-{rank}-device")
    if builder.uses_graphs:
        with builder.phase("recording steps"):
            stream.submit(runner.record_graphs).result()
    usable = {name: count - 1 for name, count in size.num_blocks.items()}
    parts = EngineParts(
        role=role,
        rank=rank,
        scheduler=builder.scheduler(loaded, size),
        runner=runner,
        stream=stream,
        sync=LocalStepSync() if groups is None else GroupStepSync(groups.sync),
        metrics=RankMetrics(recorder, role=role, num_blocks=usable),
        compiler=GrammarCompiler(grammar_vocabulary(loaded.tokenizer, vocab_size=loaded.spec.vocab_size)),
        planner=builder.planner(loaded, size, runner, stream, groups),
        groups=loaded.kv_groups,
        ready=builder.ready(loaded, size),
        vocab_size=loaded.spec.vocab_size,
        max_model_len=loaded.max_model_len,
        asynchronous=config.scheduler.asynchronous,
        observe_step=observe_step,
        check_exchange=loaded.dispatchers.check,
        arena=arena if role == "prefill" else None,
        intake=builder.intake(arena),
    )
    return RankEngine(parts)


def _max_model_len(spec: ModelSpec, wanted: int | None) -> int:
    """The configured context limit, at most the checkpoint's."""
    if wanted is not None and wanted > spec.max_model_len:
        raise ConfigError(
            f"{wanted} tokens are above the {spec.max_model_len} of the checkpoint", path="model.max_model_len"
        )
    return wanted or spec.max_model_len
