"""Bring Ray up and down, one file per provider, and start engines on it."""

from deepinfer.launcher.engine import start_engine, stop_engine
from deepinfer.launcher.local import RayConnection, open_ray

__all__ = ["RayConnection", "open_ray", "start_engine", "stop_engine"]
