"""Shipped cluster files, the memory that they need, and manifests against the fields of KubeRay's resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from deepinfer.actors.rank_life import RankProgram
from deepinfer.cli.cluster import run_command
from deepinfer.config import ClusterConfig, load_config, resolve
from deepinfer.errors import ConfigError
from deepinfer.launcher import shared
from deepinfer.launcher.kuberay import render_kuberay
from deepinfer.launcher.local import RayConnection
from deepinfer.launcher.memory import check_fits, rank_memory
from deepinfer.launcher.providers import render_ray, start_ray
from deepinfer.models.deepseek_v41.tiny import tiny_directory

FOLDER = Path(__file__).parent.parent.parent / "cluster_configs"
FILES = ("cpu-tiny", "h200-1", "h200-8", "sm100-64")
GIB = 2**30

# What the CRDs of API group ray.io/v1 (KubeRay 1.6) require and allow of the fields that we write. Their own defaults
# and Kubernetes' pod schema are left out; the manifests were also checked against the CRDs themselves.
AMOUNT = {"type": ["integer", "string"], "pattern": r"^[0-9]+(\.[0-9]*)?([KMGTPE]i|[numkMGTPE])?$"}
AMOUNTS = {"type": "object", "additionalProperties": AMOUNT}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
NODE_TERM = {
    "type": "object",
    "required": ["key", "operator"],
    "properties": {
        "key": {"type": "string"},
        "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]},
        "values": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}
POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["name", "image"],
                        "properties": {
                            "name": {"type": "string"},
                            "image": {"type": "string"},
                            "env": {"type": "array", "items": {"required": ["name"]}},
                            "resources": {
                                "properties": {"limits": AMOUNTS, "requests": AMOUNTS},
                                "additionalProperties": False,
                            },
                            "volumeMounts": {"type": "array", "items": {"required": ["name", "mountPath"]}},
                        },
                        "additionalProperties": False,
                    },
                },
                "volumes": {
                    "type": "array",
                    "items": {
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string"},
                            "configMap": {"properties": {"name": {"type": "string"}}, "additionalProperties": False},
                            "emptyDir": {
                                "properties": {"medium": {"type": "string"}, "sizeLimit": AMOUNT},
                                "additionalProperties": False,
                            },
                        },
                        "additionalProperties": False,
                    },
                },
                "affinity": {
                    "properties": {
                        "nodeAffinity": {
                            "properties": {
                                "requiredDuringSchedulingIgnoredDuringExecution": {
                                    "required": ["nodeSelectorTerms"],
                                    "properties": {
                                        "nodeSelectorTerms": {
                                            "type": "array",
                                            "items": {
                                                "properties": {"matchExpressions": {"items": NODE_TERM}},
                                                "additionalProperties": False,
                                            },
                                        }
                                    },
                                    "additionalProperties": False,
                                }
                            },
                            "additionalProperties": False,
                        }
                    },
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        }
    },
}
RAY_CLUSTER_SPEC = {
    "type": "object",
    "required": ["headGroupSpec"],
    "properties": {
        "rayVersion": {"type": "string"},
        "headGroupSpec": {
            "type": "object",
            "required": ["template"],
            "properties": {"rayStartParams": STRINGS, "template": POD},
            "additionalProperties": False,
        },
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["groupName", "maxReplicas", "minReplicas", "template"],
                "properties": {
                    "groupName": {"type": "string"},
                    **{name: {"type": "integer"} for name in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")},
                    "rayStartParams": STRINGS,
                    "labels": STRINGS,
                    "template": POD,
                },
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}
RAY_JOB_SPEC = {
    "type": "object",
    "properties": {
        "entrypoint": {"type": "string"},
        "clusterSelector": STRINGS,
        "shutdownAfterJobFinishes": {"type": "boolean"},
    },
    "additionalProperties": False,
}


def read(name: str, *settings: str) -> ClusterConfig:
    return resolve(load_config(FOLDER / f"{name}.yaml", settings=settings, environ={}).config, accelerator="cpu")


@pytest.mark.parametrize("name", FILES)
def test_shipped_files_load_and_fit(name: str) -> None:
    """Keys of features that are not built yet would be refused by name."""
    config = read(name)
    assert config.name == name
    for memory in rank_memory(config):
        assert memory.left_bytes is not None
        assert memory.left_bytes > 0.1 * memory.device_bytes
    assert render_ray(config).count("start --head") == 1


def test_the_arithmetic_in_the_comments_is_right() -> None:
    prefill, decode = rank_memory(read("h200-8"))
    assert round(decode.weights["routed experts"] / GIB, 1) == 67.2
    assert round(decode.weights["draft stages"] / GIB, 1) == 2.3
    assert round(prefill.weights["draft stages"] / GIB, 1) == 0.1
    assert (round(prefill.left_bytes / GIB), round(decode.left_bytes / GIB)) == (33, 28)
    assert round(prefill.exchange_bytes / GIB, 1) == 1.3
    assert (round(prefill.cache_bytes / GIB), round(decode.cache_bytes / GIB)) == (28, 32)
    assert 0.9 < decode.cache_bytes / decode.num_tokens / 1000 < 0.95
    prefill, decode = rank_memory(read("sm100-64"))
    assert round(sum(prefill.weights.values()) / GIB, 1) == 76.5
    assert round(decode.weights["routed experts"] / GIB, 1) == 4.2
    assert round(decode.left_bytes / GIB, 1) == 53.5


def test_what_cannot_fit_is_refused_with_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["render", str(FOLDER / "h200-8.yaml"), "--set", "prefill.ranks=2"]) == 2
    assert "prefill.ranks: a prefill rank needs 173.8 GiB" in capsys.readouterr().err
    assert run_command(["render", str(FOLDER / "h200-8.yaml")]) == 0
    assert "routed experts" in capsys.readouterr().err


def test_up_refuses_what_cannot_fit_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared, "start_ray", None)
    settings = [f"cache_dir={tmp_path}", "cache.device_bytes=1000000"]
    assert (
        run_command(["up", str(FOLDER / "cpu-tiny.yaml"), *(part for text in settings for part in ("--set", text))])
        == 2
    )
    assert "prefill.ranks: a prefill rank needs" in capsys.readouterr().err


def test_devices_of_unknown_size_are_left_to_the_ranks(tmp_path: Path) -> None:
    config = load_config(settings=["model=tiny", "accelerator=nvidia", f"cache_dir={tmp_path}"], environ={}).config
    check_fits(resolve(config, accelerator="nvidia"), tiny_directory(tmp_path))


def test_up_takes_the_accelerator_of_the_nodes_that_it_starts_ranks_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of the command may have none."""
    started: list[ClusterConfig] = []

    def join_or_start(config: ClusterConfig, *_: object) -> None:
        started.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(shared, "attach_recorded", lambda record, config: RayConnection(connected=False))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 8.0})
    monkeypatch.setattr(shared, "_join_or_start", join_or_start)
    settings = ["model=tiny", "ray.provider=existing", "ray.address=127.0.0.1:1", f"cache_dir={tmp_path}"]
    config = load_config(settings=settings, environ={}).config
    with pytest.raises(ConfigError, match="enough"):
        shared.bring_up(config, model_directory=str(tiny_directory(tmp_path)), model_digest="", program=RankProgram())
    assert config.accelerator == "auto"
    assert [(found.accelerator, found.decode.ranks) for found in started] == [("nvidia", 1)]


def test_experts_that_few_rows_of_a_prompt_reach_are_not_recast() -> None:
    """The decoder's 20 of 40 layers on a prefill rank that cuts prompts short; elsewhere all are."""
    cut, whole, invariant = (
        rank_memory(read("h200-8", "kernels.overrides={}", setting))
        for setting in ("prefill.ranks=4", "model.prefill_truncation=off", "determinism.batch_invariant=true")
    )
    experts = "routed experts"
    per_byte = (1 + 4 / 128**2) / (1 / 2 + 1 / 32) - 1
    assert [prefill.recast_bytes / (prefill.weights[experts] * per_byte) for prefill, _ in (cut, whole, invariant)] == (
        pytest.approx([0.5, 1, 1])
    )
    assert cut[1].recast_bytes == int(cut[1].weights[experts] * per_byte)


def test_buffers_of_the_exchange_within_a_host_are_counted() -> None:
    """Four ranks with 8,192 rows of 10,240 bytes: one from each, and six answers of its own; 4 + 4 GPUs of a host."""
    prefill, decode = rank_memory(read("h200-8"))
    row_bytes = 5120 * 2
    rows, answers = 4 * 8192 * (row_bytes + 6 * (8 + 4)), 8192 * 6 * row_bytes
    assert prefill.exchange_bytes >= rows + answers
    assert prefill.needed_bytes == (
        sum(prefill.weights.values()) + prefill.exchange_bytes + prefill.handover_bytes + prefill.cache_bytes
    )
    assert decode.exchange_bytes > 0
    (alone, _), (_, wide) = rank_memory(read("h200-1")), rank_memory(read("sm100-64"))
    assert (alone.exchange_bytes, wide.exchange_bytes) == (0, 0)
    assert (prefill.handover_bytes, alone.handover_bytes, wide.handover_bytes) == (GIB, GIB, 0)


def test_tables_stand_where_they_are_put() -> None:
    """One copy a node in host memory, or a share on every device."""
    prefill, decode = rank_memory(read("sm100-64", "decode.ngram_tables=sharded"))
    assert decode.weights["engram tables"] == pytest.approx(202_758_032_400 / 64, rel=1e-6)
    assert decode.host_table_bytes == 0
    assert "engram tables" not in prefill.weights
    assert prefill.host_table_bytes == 202_758_032_400


@pytest.mark.parametrize(("name", "pods"), [("cpu-tiny", [1, 1]), ("h200-8", [1, 1]), ("sm100-64", [1, 8])])
def test_manifests_have_the_fields_of_kuberay(name: str, pods: list[int]) -> None:
    config_map, cluster, job = yaml.safe_load_all(render_kuberay(read(name)))
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    jsonschema.validate(cluster["spec"], RAY_CLUSTER_SPEC)
    jsonschema.validate(job["spec"], RAY_JOB_SPEC)
    assert [group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]] == pods
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    mounted: dict[str, Any] = yaml.safe_load(config_map["data"]["cluster.yaml"])
    assert mounted["ray"]["provider"] == "existing"
    assert mounted["decode"]["ranks"] == read(name).decode.ranks


DOMAINS = "ray.domains={small: [a-1, a-2], large: [b-1, b-2, b-3, b-4, b-5, b-6, b-7, b-8, b-9, b-10, b-11]}"


def test_pods_of_a_role_stand_on_the_nodes_of_a_domain() -> None:
    """Eight pods of decode ranks fit one of the two, and prefill takes the smaller one that holds it."""
    _, cluster, _ = yaml.safe_load_all(render_kuberay(read("sm100-64", "ray.hosts=[]", DOMAINS)))
    jsonschema.validate(cluster["spec"], RAY_CLUSTER_SPEC)
    groups = cluster["spec"]["workerGroupSpecs"]
    assert [(group["groupName"], group["replicas"]) for group in groups] == [("decode-large", 8), ("prefill-small", 1)]
    assert [group["labels"] for group in groups] == [{"ray.io/gpu-domain": name} for name in ("large", "small")]
    affinity = groups[1]["template"]["spec"]["affinity"]["nodeAffinity"]
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["a-1", "a-2"]}]}


def test_a_role_that_no_domain_holds_fills_one_after_the_other() -> None:
    domains = "ray.domains={one: [a, b, c], two: [d, e, f, g, h], six: [i, j]}"
    _, cluster, _ = yaml.safe_load_all(render_kuberay(read("sm100-64", "ray.hosts=[]", domains)))
    groups = [(group["groupName"], group["replicas"]) for group in cluster["spec"]["workerGroupSpecs"]]
    assert groups == [("decode-two", 5), ("decode-one", 3), ("prefill-six", 1)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ray.domains={one: [a, b], two: [c]}", "ray.domains: 8 pods of decode ranks need a node each, left are 2 in"),
        ("ray.domains={Rack_1: [a]}", "ray.domains: 'Rack_1' becomes part of a name"),
        ("name=1st", "name: '1st' can't be the name of a RayCluster"),
        ("name=zwölf", "name: 'zwölf' can't be the name"),
        ("name=ends-", "name: 'ends-' can't be the name"),
        (f"name={'a' * 45}", "name: 'aa*' can't be the name of a RayCluster: use at most 44"),
    ],
)
def test_what_the_operator_would_refuse_is_refused_first(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_kuberay(read("sm100-64", "ray.hosts=[]", setting))


def test_ranks_that_do_not_fill_pods_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode.ranks_per_node: 60 ranks can't be spread evenly over pods of 8"):
        render_kuberay(read("sm100-64", "decode.ranks=60"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["ray.provider=kuberay"], "ray.provider: 'kuberay' is brought up by Kubernetes"),
        (["ray.provider=ssh"], "ray.hosts: provider 'ssh' needs the names of the hosts"),
        (["ray.provider=existing"], "ray.address: provider 'existing' needs the address"),
    ],
)
def test_providers_say_what_they_need(settings: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=message):
        start_ray(read("cpu-tiny", *settings))
