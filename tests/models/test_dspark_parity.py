"""Drafts of the golden variants: logits, confidences and tokens against those of the released reference.

Every row is given the reference's own token before it, so that all of them can be compared. While the backbone agrees
with the record so do the drafts, to rounding. Where the backbone doesn't (a near-tie of an index score that was summed
in another order, see the golden set's README), the drafts see other features: then the looser figures hold.

The full golden set has its drafts in `cases.safetensors`, the trimmed one some of them in `dspark.safetensors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from support.draft_case import DraftRunner, draft_model
from support.golden_case import case_names, read_tensors, relative_error, variants
from torch import Tensor

from tests.support.paths import GOLDEN

MODES = ("fp32_noq", "ref", "noq")
SAME_BACKBONE = {"fp32_noq": 5e-6, "ref": 3e-4, "noq": 3e-4}  # relative error of logits; stored as float16 but fp32_noq
# Then of the drafts: relative error of logits (stored as float16: 2.4e-4), error of confidences, margin of a flipped
# choice. Where the stages run in bf16 a single value may round the other way: 1 / 128 at a confidence between 1 and 2.
SAME = {"fp32_noq": (3e-4, 1e-5, 0.0), "ref": (0.01, 0.02, 0.1), "noq": (0.01, 0.02, 0.1)}
# The golden set gives 0.21 (w16) and 0.097 (w128) for the logits of two faithful implementations, "ref_alt vs ref".
OTHER = (0.21, 0.6, 2.0)


@dataclass
class Errors:
    """Largest error so far of the backbone's logits."""

    backbone: float

    def agrees(self, mode: str) -> bool:
        return self.backbone <= SAME_BACKBONE[mode]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    golden_dir = metafunc.config.getoption("--golden-dir") or GOLDEN
    cases = [
        pytest.param(variant, mode, case, id=f"{variant.name}-{mode}-{case}")
        for variant in variants(golden_dir)
        for mode in MODES
        for case in case_names(variant, mode)
        if _recorded_drafts(variant, f"{case}.{mode}.")
    ]
    metafunc.parametrize(("variant", "mode", "case"), cases)


def _recorded_drafts(variant: Path, prefix: str) -> dict[str, Tensor]:
    """Return tokens, confidence and perhaps logits."""
    found: dict[str, Tensor] = {}
    for name in ("cases.safetensors", "dspark.safetensors"):
        if (variant / name).exists():
            found |= read_tensors(variant / name, f"{prefix}dspark_")
    return found


def test_drafts_are_those_of_the_reference(variant: Path, mode: str, case: str) -> None:
    file = variant / "cases.safetensors"
    given, recorded = read_tensors(file, f"{case}."), read_tensors(file, f"{case}.{mode}.")
    drafts = _recorded_drafts(variant, f"{case}.{mode}.")
    runner = DraftRunner(draft_model(variant, mode))
    prefill = runner.run_tokens(1, given["prompt_ids"].long())
    errors = Errors(_largest(prefill, recorded["prefill_logits"]))
    for step, token in enumerate(given["decode_input_ids"].long()):
        logits = runner.run_tokens(1, token[None])
        errors.backbone = max(errors.backbone, _largest(logits, recorded["decode_logits"][step, None]))
        tokens = drafts["tokens"][step].long()
        drafted = runner.draft_along(1, tokens)
        same = errors.agrees(mode)
        max_error, max_away, max_margin = SAME[mode] if same else OTHER
        away = (drafted.confidence - drafts["confidence"][step]).abs().max()
        assert away <= max_away, (step, same, away)
        if "logits" in drafts:
            wanted = drafts["logits"][step].float()
            error = _largest(drafted.logits, wanted)
            assert error <= max_error, (step, same, error)
        margin = drafted.logits.amax(1) - drafted.logits.gather(1, tokens[1:, None])[:, 0]
        assert margin.max() <= max_margin, (step, same, margin)


def _largest(logits: Tensor, wanted: Tensor) -> float:
    return float(relative_error(logits, wanted).max())
