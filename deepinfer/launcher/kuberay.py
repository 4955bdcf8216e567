"""Kubernetes manifests for an engine on KubeRay: a config map with the cluster file, a RayCluster and a RayJob.

Fields of RayCluster and RayJob are those of the API group ray.io/v1 of KubeRay (labels of a group since its version
1.5); what its operator asks of names stands in ray-operator/controllers/ray/utils (validation.go, constant.go). The
RayJob runs `deepinfer-cluster up` inside the cluster and ends; the engine stays, and later jobs are submitted to the
same RayCluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import yaml
from ray import __version__ as ray_version

from deepinfer.actors.domains import DOMAIN_LABEL
from deepinfer.config import ClusterConfig
from deepinfer.errors import ConfigError
from deepinfer.launcher.kuberay_groups import DNS_LABEL, PodGroup, pod_groups
from deepinfer.launcher.local import object_store_bytes

_API = "ray.io/v1"
_FOLDER = "/etc/deepinfer"
_FILE = "cluster.yaml"
_HOST_LABEL = "kubernetes.io/hostname"  # Kubernetes puts it on every node
_UP = "-up"
_MAX_NAME = 47 - len(_UP)  # of a RayJob


def render_kuberay(config: ClusterConfig) -> str:
    """Return the manifests as YAML documents; `config` is resolved. Raises ConfigError for a bad name."""
    name = config.name
    if not DNS_LABEL.fullmatch(name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"{name!r} can't be the name of a RayCluster: use at most {_MAX_NAME} small letters, digits and dashes, "
            "a letter first and no dash last",
            path="name",
        )
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
            "workerGroupSpecs": [_group(config, pods) for pods in pod_groups(config)],
        },
    }


def _group(config: ClusterConfig, pods: PodGroup) -> dict[str, Any]:
    num_devices = -(-pods.num_ranks // (config.ranks_per_device or 1))
    return {
        "groupName": pods.name,
        "replicas": pods.num_pods,
        "minReplicas": pods.num_pods,
        "maxReplicas": pods.num_pods,
        "numOfHosts": 1,
        **({"labels": {DOMAIN_LABEL: pods.domain}} if pods.domain else {}),
        "rayStartParams": (
            {"num-cpus": str(pods.num_ranks)} if config.accelerator == "cpu" else {"num-gpus": str(num_devices)}
        ),
        "template": _pod(config, "ray-worker", num_ranks=pods.num_ranks, nodes=pods.nodes),
    }


def _pod(config: ClusterConfig, container: str, *, num_ranks: int, nodes: Sequence[str] = ()) -> dict[str, Any]:
    """A pod for `num_ranks` ranks; on one of `nodes` if there are any."""
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
            **({"affinity": _affinity(nodes)} if nodes else {}),
        }
    }


def _affinity(nodes: Sequence[str]) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": _HOST_LABEL, "operator": "In", "values": list(nodes)}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _ray_job(config: ClusterConfig) -> dict[str, Any]:
    return {
        "apiVersion": _API,
        "kind": "RayJob",
        "metadata": {"name": f"{config.name}{_UP}"},
        "spec": {
            "entrypoint": f"deepinfer-cluster up {_FOLDER}/{_FILE}",
            "clusterSelector": {"ray.io/cluster": config.name},
            "shutdownAfterJobFinishes": False,
        },
    }
