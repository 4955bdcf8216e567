"""Golden variants: their checkpoint with a mode's numerics, and their recorded tensors."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from deepinfer.kernels.ops import FP32_NUMERICS, REFERENCE_NUMERICS, Numerics
from deepinfer.kernels.registry import KernelSet, select_kernels
from deepinfer.models.deepseek_v41.config_file import read_config
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.token_map import read_token_map
from deepinfer.models.deepseek_v41.weights import load_weights

MODES = {
    "ref": REFERENCE_NUMERICS,
    "kvq": Numerics(torch.bfloat16, quantise_activations=False, quantise_caches=True),
    "noq": Numerics(torch.bfloat16, quantise_activations=False, quantise_caches=False),
    "fp32_noq": FP32_NUMERICS,
}


def variants(golden_dir: Path) -> list[Path]:
    """Return the variant folders of a golden set, in order of name."""
    found = sorted(path.parent for path in golden_dir.glob("*/cases.safetensors"))
    assert found, f"no golden variant in {golden_dir}"
    return found


def mode_kernels(mode: str) -> KernelSet:
    """Return the CPU kernels of a golden mode."""
    return select_kernels("cpu", numerics=MODES[mode], batch_invariant=True, overrides={})


def load_model(
    variant: Path, kernels: KernelSet, *, device: str = "cpu", upstream_open_pair_keys: bool = False
) -> DeepseekV41:
    """Load a variant's checkpoint; the switch adds the released code's defect on decode steps."""
    config = read_config(variant)
    experts = (tuple(range(config.n_routed_experts)),) * config.num_layers
    weights = load_weights(variant, config, expert_ids=experts, device=torch.device(device))
    token_map = torch.from_numpy(read_token_map(variant, config)).long().to(device)
    return DeepseekV41(config, weights, token_map, kernels, upstream_open_pair_keys=upstream_open_pair_keys)


@functools.lru_cache(maxsize=2)
def golden_model(variant: Path, mode: str) -> DeepseekV41:
    """Return the variant's model in the numerics of a mode."""
    return load_model(variant, mode_kernels(mode))


def read_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose name begins with `prefix`, keyed by the rest of their name."""
    with safe_open(str(path), "pt") as file:
        return {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


def case_names(variant: Path, mode: str) -> list[str]:
    """Return the cases that were recorded in `mode`."""
    with safe_open(str(variant / "cases.safetensors"), "pt") as file:
        return sorted(name.split(".")[0] for name in file.keys() if name.endswith(f".{mode}.decode_logits"))  # noqa: SIM118


def relative_error(value: Tensor, wanted: Tensor) -> Tensor:
    """L2 error of each row divided by the L2 norm of the wanted row; zero rows must match exactly."""
    value, wanted = value.float().flatten(1), wanted.float().flatten(1)
    return (value - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
