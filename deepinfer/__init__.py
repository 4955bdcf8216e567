"""deepinfer: offline inference of DeepSeek-V4.1-Flash on many accelerators, one Ray actor per rank.

Importing the package imports neither torch nor Ray; `LLM`, `SamplingParams` and `RequestOutput` load on first use.
"""

from __future__ import annotations

import importlib

__version__ = "0.2.0"

_LAZY = {
    "LLM": "deepinfer.llm",
    "RequestOutput": "deepinfer.llm",
    "SamplingParams": "deepinfer.protocol",
}

__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
