"""Bring Ray up and down, one file per provider."""

from deepinfer.launcher.local import RayConnection, open_ray

__all__ = ["RayConnection", "open_ray"]
