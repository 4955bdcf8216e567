"""Kubernetes manifests for an engine on KubeRay: a config map with the cluster file, a RayCluster and a RayJob.

Fields of RayCluster and RayJob are those of the API group ray.io/v1 of KubeRay. The RayJob runs `deepinfer-cluster up`
inside the cluster and ends; the engine stays, and later jobs are submitted to the same RayCluster.
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml
from ray import __version__ as ray_version

from deepinfer.config import ClusterConfig
from deepinfer.errors import ConfigError
from deepinfer.launcher.local import object_store_bytes

_API = "ray.io/v1"
_FOLDER = "/etc/deepinfer"
_FILE = "cluster.yaml"
_GPUS_PER_NODE = 8


def render_kuberay(config: ClusterConfig) -> str:
    """Return the manifests as YAML documents; `config` is resolved. Raises ConfigError for a bad name."""
    name = config.name
    if not name.replace("-", "").isalnum() or name != name.lower() or name.startswith("-") or name.endswith("-"):
        raise ConfigError(f"{name!r} is no Kubernetes name: use small letters, digits and dashes", path="name")
    manifests = [_config_map(config), _ray_cluster(config), _ray_job(config)]
    return yaml.safe_dump_all(manifests, sort_keys=False)


def _config_map(config: ClusterConfig) -> dict[str, Any]:
    """The cluster file as the pods see it: their Ray exists already."""
    inside = msgspec.structs.replace(config.ray, provider="existing", address="auto")
    tree = msgspec.to_builtins(msgspec.structs.replace(config, ray=inside))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{config.name}-config"},
        "data": {_FILE: yaml.safe_dump(tree, sort_keys=False)},
    }


def _ray_cluster(config: ClusterConfig) -> dict[str, Any]:
    return {
        "apiVersion": _API,
        "kind": "RayCluster",
        "metadata": {"name": config.name},
        "spec": {
            "rayVersion": ray_version,
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                "template": _pod(config, "ray-head", num_ranks=0),
            },
            "workerGroupSpecs": [
                _group(config, "prefill", config.prefill.ranks or 1, config.prefill.ranks_per_node),
                _group(config, "decode", config.decode.ranks or 1, config.decode.ranks_per_node),
            ],
        },
    }


def _group(config: ClusterConfig, role: str, ranks: int, ranks_per_node: int | None) -> dict[str, Any]:
    per_pod = min(ranks, ranks_per_node or _GPUS_PER_NODE)
    if ranks % per_pod:
        raise ConfigError(f"{ranks} ranks can't be spread evenly over pods of {per_pod}", path=f"{role}.ranks_per_node")
    num_pods = ranks // per_pod
    num_devices = -(-per_pod // (config.ranks_per_device or 1))
    return {
        "groupName": role,
        "replicas": num_pods,
        "minReplicas": num_pods,
        "maxReplicas": num_pods,
        "numOfHosts": 1,
        "rayStartParams": {"num-cpus": str(per_pod)} if config.accelerator == "cpu" else {"num-gpus": str(num_devices)},
        "template": _pod(config, "ray-worker", num_ranks=per_pod),
    }


def _pod(config: ClusterConfig, container: str, *, num_ranks: int) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if num_ranks and config.accelerator == "nvidia":
        num_devices = -(-num_ranks // (config.ranks_per_device or 1))
        resources = {"limits": {"nvidia.com/gpu": num_devices}, "requests": {"nvidia.com/gpu": num_devices}}
    mounts = [
        {"name": "config", "mountPath": _FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    # The object store, and room for the collectives' own buffers.
    shared_memory = {"medium": "Memory", "sizeLimit": f"{(object_store_bytes(config) >> 20) + 1024}Mi"}
    return {
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": config.ray.image,
                    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                    "resources": resources,
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [
                {"name": "config", "configMap": {"name": f"{config.name}-config"}},
                {"name": "shm", "emptyDir": shared_memory},
            ],
        }
    }


def _ray_job(config: ClusterConfig) -> dict[str, Any]:
    return {
        "apiVersion": _API,
        "kind": "RayJob",
        "metadata": {"name": f"{config.name}-up"},
        "spec": {
            "entrypoint": f"deepinfer-cluster up {_FOLDER}/{_FILE}",
            "clusterSelector": {"ray.io/cluster": config.name},
            "shutdownAfterJobFinishes": False,
        },
    }
