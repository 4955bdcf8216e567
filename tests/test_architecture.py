"""The rules of the house: imports go down, third parties stay on their floor, one module reads the environment."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from deepinfer.config import all_paths

PACKAGE = Path(__file__).parent.parent / "deepinfer"

# Lower stands left. A module may import what stands before it, and its own room.
ORDER = [
    "errors", "log", "metrics", "settings_tree", "config", "protocol", "codec",
    "kv_cache", "tokenizer", "schema_check", "scheduler",
    "platforms", "kernels", "distributed",
    "models", "structured_outputs", "sampling", "speculative",
    "runtime",
    "actors",
    "outputs", "launcher", "client", "llm", "batch_file", "cli",
]  # fmt: skip

_GROUND = {"msgspec", "numpy", "yaml"}
_LOGIC = _GROUND | {"tokenizers", "deepseek_recipe"}
_DEVICE = _LOGIC | {"torch", "psutil"}
_KERNELS = _DEVICE | {"triton", "deep_gemm", "flash_mla"}
_MODEL = _DEVICE | {"safetensors", "huggingface_hub"}
_DOORS = _LOGIC | {"ray", "psutil"}
THIRD_PARTIES = {
    **dict.fromkeys(["errors", "log", "metrics", "settings_tree", "config", "protocol", "codec"], _GROUND),
    **dict.fromkeys(["kv_cache", "tokenizer", "schema_check", "scheduler"], _LOGIC),
    **dict.fromkeys(["platforms", "distributed", "sampling", "speculative", "runtime"], _DEVICE),
    "kernels": _KERNELS,
    "models": _MODEL,
    "structured_outputs": _DEVICE | {"xgrammar"},
    "actors": _DOORS,
    **dict.fromkeys(["outputs", "client", "llm", "launcher"], _DOORS),
    "batch_file": _GROUND | {"fsspec"},
    "cli": _DOORS | {"typer", "rich", "click"},
}

# Modules below `kernels/` and `platforms/` that a registry loads by name, and the one place that may do it.
LATE_IMPORTERS = {
    "__init__.py",
    "platforms/platform.py",
    "kernels/registry.py",
    "distributed/dispatchers.py",
    "models/registry.py",
    "actors/rank_actor.py",
    "cli/main.py",
}


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> list[tuple[ast.stmt, str]]:
    found: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            found.append((node, node.module or ""))
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room = _room(path)
    if room == "__init__":
        return
    assert room in ORDER, f"{room} has no place in the order of rooms"
    for node, name in _imports(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        if top == "deepinfer":
            target = rest.split(".")[0] if rest else "__init__"
            if target in ("__init__", room):
                continue
            assert ORDER.index(target) < ORDER.index(room), f"line {node.lineno}: {room} may not import {target}"
        elif top not in sys.stdlib_module_names:
            assert top in THIRD_PARTIES[room], f"line {node.lineno}: {top} is not allowed in {room}"


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_stand_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not inner, f"import inside {function.name}, line {inner[0]}"
    if str(path.relative_to(PACKAGE)) not in LATE_IMPORTERS:
        assert "importlib.import_module" not in path.read_text(), "only a registry loads modules by name"


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_config_reads_the_environment(path: Path) -> None:
    """Ray's own variables are written, never read, by the launcher and for rank processes."""
    if path == PACKAGE / "config.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            allowed = _room(path) in ("launcher", "actors")
            assert allowed, f"line {node.lineno} touches the environment"


def test_every_room_says_what_it_is_for() -> None:
    for path in _modules():
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path.relative_to(PACKAGE)} has no docstring"


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    import subprocess

    code = "import sys, deepinfer; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_are_a_decision() -> None:
    """A new option must be added here too: it is part of the contract with users."""
    assert all_paths() == [
        "name",
        "accelerator",
        "ranks_per_device",
        "model.path",
        "model.revision",
        "model.max_model_len",
        "model.prefill_truncation",
        "model.prefill_keep_tokens",
        "ray.provider",
        "ray.address",
        "ray.namespace",
        "ray.runtime_env",
        "ray.object_store_bytes",
        "ray.temp_dir",
        "ray.dashboard",
        "ray.port",
        "ray.dashboard_port",
        "ray.hosts",
        "ray.domains",
        "ray.ssh_command",
        "ray.python",
        "ray.image",
        "prefill.ranks",
        "prefill.ranks_per_node",
        "prefill.attention",
        "prefill.max_running",
        "prefill.max_tokens_per_step",
        "prefill.ngram_tables",
        "decode.ranks",
        "decode.ranks_per_node",
        "decode.max_running",
        "decode.redundant_experts",
        "decode.graphs",
        "decode.ngram_tables",
        "cache.block_size",
        "cache.memory_bytes",
        "cache.memory_fraction",
        "cache.device_bytes",
        "cache.handover_bytes",
        "cache.prefix_caching",
        "cache.kv_channel",
        "scheduler.max_in_flight",
        "scheduler.publish_seconds",
        "scheduler.max_kv_bytes_in_flight",
        "scheduler.max_logprob_bytes",
        "scheduler.step_timeout_seconds",
        "scheduler.start_timeout_seconds",
        "scheduler.placement_timeout_seconds",
        "scheduler.job_timeout_seconds",
        "scheduler.orphan_timeout_seconds",
        "scheduler.asynchronous",
        "speculative.max_draft_tokens",
        "speculative.varlen",
        "speculative.verifier",
        "experts.rebalance",
        "determinism.batch_invariant",
        "kernels.numerics",
        "kernels.overrides",
        "observability.log_level",
        "observability.metrics_interval_seconds",
        "cache_dir",
    ]
