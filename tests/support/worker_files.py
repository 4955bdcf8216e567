"""Which tests go to the same worker when the suite runs on several."""

from __future__ import annotations

import functools
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]


class RayOnOneWorker(LoadFileScheduling):
    """A file stays on one worker, since its tests share what is dear to make; all files with a Ray go to the same."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "ray" if _starts_ray(file) else file


@functools.cache
def _starts_ray(file: str) -> bool:
    return "pytest.mark.cluster" in (ROOT / file).read_text(encoding="utf-8")
