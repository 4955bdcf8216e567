"""Places behind one switch, with labelled raylets and real placement groups."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, Commands


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_a_role_stay_in_a_domain(commands: Commands) -> None:
    code = [sys.executable, str(Path(__file__).parent / "domains_case.py"), str(commands.folder)]
    done = subprocess.run(
        code, env=commands.environment(), stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=350, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found["side by side"]) == [["alone"] * 4, ["rack-a"] * 4], "both began with the same choice"
    assert found["six"] == ["rack-b"] * 6, "the node without a label belongs to no rack"
    assert found["eight"] == ["rack-b"] * 6 + ["rack-a"] * 2
    assert found["three a node"] == ["rack-b"] * 6
    assert found["taken"].startswith("ClusterError: no place for the other ranks within 3 s: asked for 7 CPU")
    assert "rack-a: 2 nodes, 0 of 4 free; rack-b: 2 nodes, 6 of 6 free; node " in found["taken"]
    assert found["too large"].startswith("ConfigError: prefill.ranks: no place for the prefill ranks within 3 s")
    assert "asked for 3 nodes with 4 CPU each" in found["too large"]
