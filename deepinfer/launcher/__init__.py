"""Bring Ray up and down, one file per provider, and start engines on it."""

from deepinfer.launcher.accelerator import resolve_for_ray, resolve_here
from deepinfer.launcher.differences import check_joinable
from deepinfer.launcher.engine import find_driver, start_engine, stop_engine
from deepinfer.launcher.host_need import check_host
from deepinfer.launcher.local import RayConnection, open_ray
from deepinfer.launcher.logs import read_logs
from deepinfer.launcher.model_settings import check_model_settings
from deepinfer.launcher.orphans import revive
from deepinfer.launcher.record import ClusterRecord
from deepinfer.launcher.shared import bring_up, connected, read_status, take_down

__all__ = [
    "ClusterRecord",
    "RayConnection",
    "bring_up",
    "check_host",
    "check_joinable",
    "check_model_settings",
    "connected",
    "find_driver",
    "open_ray",
    "read_logs",
    "read_status",
    "resolve_for_ray",
    "resolve_here",
    "revive",
    "start_engine",
    "stop_engine",
    "take_down",
]
