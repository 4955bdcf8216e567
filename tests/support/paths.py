"""Where the test data lies."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"
