"""The tiny checkpoint for all tests of this folder."""

from __future__ import annotations

from support.tiny_checkpoint import directory

__all__ = ["directory"]
