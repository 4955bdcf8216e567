"""`deepinfer bench`: steps of one rank against what the device can do, the cost of scheduling, and whole jobs."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.console import Console

from deepinfer.cli.bench_report import Report, print_report, print_scheduling, report_json
from deepinfer.cli.options import Address, Cluster, ClusterSettings, Model, Settings, Verbose, load_options, log_level
from deepinfer.cli.run import run
from deepinfer.config import DEFAULT_MODEL, ClusterConfig, resolve
from deepinfer.errors import ConfigError
from deepinfer.log import set_up_logging
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.random_model import RandomSpec
from deepinfer.models.deepseek_v41.random_weights import with_layers, with_table_share
from deepinfer.models.deepseek_v41.released import released_config
from deepinfer.models.deepseek_v41.step_costs import StepShape, decode_shape, prefill_shape, step_costs
from deepinfer.models.deepseek_v41.tiny_tokenizer import tokenizer_config_json, tokenizer_json
from deepinfer.models.model_source import resolve_model
from deepinfer.models.model_spec import ModelSpec
from deepinfer.platforms.platform import detect_accelerator
from deepinfer.runtime.bench.bench_rank import BenchCase, bench_config, run_bench
from deepinfer.runtime.bench.scheduling import driver_cost, rank_step_seconds
from deepinfer.tokenizer import Tokenizer

app = typer.Typer(
    help=(
        "Measure steps of one rank, scheduling, or a whole job.\n\n"
        "Example: deepinfer bench decode --requests 64 --context 8192"
    ),
    no_args_is_help=True,
)

_WIDTH = 130  # of lines that go into a file
_CONTEXT, _SCHEDULER_STEPS = 8192, 100
_TABLE_SHARES = 64  # fewer would not fit beside the rest; rows of a whole table take up to six times as long
_DECODE_RANKS, _PREFILL_RANKS = 64, 4  # where no cluster file says how many
_STEP_TOKENS = 16_384  # likewise

Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, help="Ranks of the group that this one stands for.", show_default="64, prefill 4"),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps (prefill: prompts) that are measured.")]
WarmUp = Annotated[int, typer.Option("--warm-up", min=1, help="Steps (prefill: prompts) before them.")]
Watched = Annotated[int, typer.Option("--watch", min=0, help="Steps (prefill: prompts) for the table of kernels.")]
Layers = Annotated[
    int | None, typer.Option("--layers", min=1, help="Cut the model to its first layers.", show_default="all")
]
Skew = Annotated[
    Path | None,
    typer.Option(
        "--skew",
        metavar="FILE",
        help="JSON list: rows of each expert of this rank, in any unit; without it all get the same.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON too.", show_default=False)
]


@app.command()
def decode(
    requests: Annotated[int, typer.Option("--requests", min=1, help="Sequences that decode on the rank.")] = 256,
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens of each of them.")] = 131_072,
    drafts: Annotated[int, typer.Option("--drafts", min=0, help="Drafts verified in each step.")] = 3,
    acceptance: Annotated[
        float, typer.Option("--acceptance", min=1.0, help="Tokens a pass to reckon with: random weights accept none.")
    ] = 3.25,
    model: Model = None,
    cluster: ClusterSettings = None,
    ranks: Ranks = None,
    layers: Layers = None,
    steps: Steps = 20,
    warm_up: WarmUp = 5,
    watch: Watched = 5,
    skew: Skew = None,
    json_file: JsonFile = None,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Time decode steps of one rank at real shapes, with random weights and a cache that counts as filled.

    Example: deepinfer bench decode --requests 256 --context 131072 --drafts 3 --json decode.json
    """
    config = _config(cluster, settings, model, verbose=verbose)
    num_ranks = ranks or (config.decode.ranks if cluster else None) or _DECODE_RANKS
    case = BenchCase("decode", num_ranks, requests, context, steps, warm_up, watch, _shares(skew))
    shape = decode_shape(num_requests=requests, context=context, num_drafts=drafts, num_ranks=num_ranks)
    tokens = requests * (acceptance if drafts else 1.0)
    _run(case, bench_config(config, case, max_drafts=drafts), layers, shape, tokens, json_file)


@app.command()
def prefill(
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each prompt.")] = 4096,
    model: Model = None,
    cluster: ClusterSettings = None,
    ranks: Ranks = None,
    layers: Layers = None,
    steps: Steps = 10,
    warm_up: WarmUp = 3,
    watch: Watched = 3,
    skew: Skew = None,
    json_file: JsonFile = None,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Time prompts on one prefill rank, one after another.

    A step takes up to 16,384 tokens of a prompt, or prefill.max_tokens_per_step where --set or a cluster file says it;
    a cluster file that does not has the default of a job.

    Example: deepinfer bench prefill --tokens 65536 --set prefill.max_tokens_per_step=8192
    """
    config = _config(cluster, settings, model, verbose=verbose)
    num_ranks = ranks or (config.prefill.ranks if cluster else None) or _PREFILL_RANKS
    case = BenchCase("prefill", num_ranks, 1, tokens, steps, warm_up, watch, _shares(skew))
    case_config = bench_config(config, case, max_drafts=config.speculative.max_draft_tokens)
    shape = prefill_shape(num_tokens=tokens, keep_tokens=_keep_tokens(config, case_config), num_ranks=num_ranks)
    _run(case, case_config, layers, shape, float(tokens), json_file)


@app.command()
def scheduler(
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of the driver's job.")] = 20_000,
    running: Annotated[int, typer.Option("--running", min=1, help="Sequences that decode on a rank.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens that each request gets.")] = 256,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Decode ranks, beside 4 prefill ranks.")] = 64,
    drafts: Annotated[int, typer.Option("--drafts", min=0, help="Drafts that a rank's step may commit.")] = 3,
) -> None:
    """Time what scheduling costs on this host, with devices that answer at once. No model, no Ray.

    Example: deepinfer bench scheduler --requests 20000 --ranks 64
    """
    step = rank_step_seconds(running, context=_CONTEXT, rows_per_slot=1 + drafts, num_steps=_SCHEDULER_STEPS)
    cost = driver_cost(
        requests, prefill_ranks=_PREFILL_RANKS, decode_ranks=ranks, max_running=running, max_tokens=tokens
    )
    print_scheduling(step, cost, num_sequences=running, num_ranks=ranks, console=_console())


@app.command()
def offline(
    source: Annotated[str, typer.Option("--input", "-i", metavar="IN", help="Batch file of `deepinfer run`.")],
    model: Model = None,
    cluster: Cluster = None,
    address: Address = None,
    settings: Settings = None,
    verbose: Verbose = False,
) -> None:
    """Run a real job, as `deepinfer run` does, and show its throughput; the answers are thrown away.

    Example: deepinfer bench offline -i rows.jsonl --model tiny
    """
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as folder:
        run(
            source,
            str(Path(folder) / "answers.jsonl"),
            model=model,
            cluster=cluster,
            address=address,
            allow_row_errors=True,
            settings=settings,
            verbose=verbose,
        )


def _config(cluster: Path | None, settings: list[str] | None, model: str | None, *, verbose: bool) -> ClusterConfig:
    config = load_options(cluster, settings=settings, model=model).config
    if cluster is None and config.prefill.max_tokens_per_step is None:
        replace = msgspec.structs.replace
        config = replace(config, prefill=replace(config.prefill, max_tokens_per_step=_STEP_TOKENS))
    config = resolve(config, accelerator=detect_accelerator())
    set_up_logging(log_level(config, verbose=verbose))
    return config


def _keep_tokens(config: ClusterConfig, case_config: ClusterConfig) -> int | None:
    if config.model.prefill_truncation == "off":
        return None
    spec = RandomSpec(_model_config(config))
    max_drafts = case_config.speculative.max_draft_tokens
    return spec.prompt_keep_tokens(config.model.prefill_keep_tokens, max_draft_tokens=max_drafts)


def _run(
    case: BenchCase,
    config: ClusterConfig,
    layers: int | None,
    shape: StepShape,
    tokens: float,
    json_file: Path | None,
) -> None:
    model = _model_config(config)
    model = with_table_share(with_layers(model, layers or model.num_layers), num_shares=_TABLE_SHARES)
    if case.num_tokens > model.max_position_embeddings:
        raise ConfigError(f"{case.num_tokens} tokens are above the model's {model.max_position_embeddings}")
    spec = cast("ModelSpec", RandomSpec(model))
    _check_group(case, spec)
    times = run_bench(case, config, spec, _tokenizer(model))
    report = Report(case, model.num_layers, tokens, times, step_costs(model, shape), config.prefill.step_tokens)
    print_report(report, _console())
    if json_file is not None:
        content = report_json(report) | {"config": msgspec.to_builtins(config), "model": msgspec.to_builtins(model)}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _check_group(case: BenchCase, spec: ModelSpec) -> None:
    """Raise ConfigError for more ranks than experts, or shares that are not one of each expert of the rank."""
    num_local = spec.num_experts // case.num_ranks  # of rank 0
    if num_local == 0:
        raise ConfigError(f"{case.num_ranks} are more than the model's {spec.num_experts} experts", path="--ranks")
    shares = case.shares
    if shares is not None and len(shares) != num_local:
        raise ConfigError(
            f"{len(shares)} numbers for the {num_local} experts of one of {case.num_ranks} ranks; write {num_local}",
            path="--skew",
        )


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def _model_config(config: ClusterConfig) -> ModelConfig:
    """Return the shapes; the released model's need no files."""
    if config.model.path == DEFAULT_MODEL:
        return released_config()
    cache_dir = Path(config.cache_dir)
    return read_config(resolve_model(config.model.path, revision=config.model.revision, cache_dir=cache_dir))


def _tokenizer(model: ModelConfig) -> Tokenizer:
    """Return the tiny vocabulary: nothing is ever read or written as text here."""
    return Tokenizer(tokenizer_json(), tokenizer_config_json(model.max_position_embeddings))


def _shares(file: Path | None) -> tuple[float, ...] | None:
    if file is None:
        return None
    try:
        shares: Any = json.loads(file.read_text(encoding="utf-8"))
        found = tuple(msgspec.convert(shares, list[float], strict=False))
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file} is no JSON list of numbers: {error}", path="--skew") from None
    if not 0 < sum(found) < math.inf or min(found) < 0:
        raise ConfigError(f"{file} has {list(found)}; write finite numbers from 0 on, not all 0", path="--skew")
    return found
