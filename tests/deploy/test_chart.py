"""The Helm chart, rendered by Helm's own engine and checked against the schemas of Kubernetes and of KubeRay.

It has not been installed on a cluster.
"""

import json
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainhouse import __version__
from trainhouse.server.config.server_config import OPTIONS

from .tools import DEPLOY, passes, tool

pytestmark = pytest.mark.slow

CHART = DEPLOY / "helm" / "trainhouse"
SCHEMA = Path(__file__).with_name("raycluster.schema.json")
Manifest = dict[str, Any]

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "everything": {
        "ingress": {"enabled": True, "annotations": {"cert-manager.io/cluster-issuer": "letsencrypt"}},
        "config": {"checkpoints": "s3://bucket/house", "tenant_weights": "alice=2"},
        "secrets": {"environment": "house-s3", "database": "house-database"},
        "postgresql": {"enabled": False},
        "imagePullSecrets": [{"name": "registry"}],
        "state": {"existingClaim": "shared"},
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/house"}},
        "rayCluster": {
            "groups": [
                {
                    "name": name,
                    "replicas": 2,
                    "numOfHosts": hosts,
                    "gpus": gpus,
                    "resources": {"limits": {"memory": "64Gi"}},
                    "sharedMemory": "8Gi",
                    "cache": {"hostPath": "/mnt/models"},
                    "nodeSelector": {"kind": name},
                }
                for name, hosts, gpus in (("train", 2, 8), ("sample", 1, 1), ("cpu", 1, 0))
            ]
        },
    },
    "open": {"networkPolicy": {"enabled": False}, "disruptionBudget": {"ray": False}, "replicas": 1},
}


def helm(values: Mapping[str, Any]) -> dict[str, Any]:
    python = tool("hadolint").with_name("python")
    script = Path(__file__).with_name("render_chart.py")
    done = subprocess.run([python, script, CHART], input=json.dumps(values), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def render(values: Mapping[str, Any]) -> list[Manifest]:
    answer = helm(values)
    assert answer["linted"] == [] and "error" not in answer, answer
    files = (text for name, text in answer["rendered"].items() if name.endswith(".yaml"))
    return [manifest for text in files for manifest in yaml.safe_load_all(text) if manifest]


def of_kind(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def pod_templates(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Returns the templates of a RayCluster's pods by group, and those of the other pods by name."""
    cluster = of_kind(manifests, "RayCluster")[0]["spec"]
    ray = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    others = of_kind(manifests, "Deployment") + of_kind(manifests, "StatefulSet")
    return (
        ray
        | {"head": cluster["headGroupSpec"]["template"]}
        | {manifest["metadata"]["name"]: manifest["spec"]["template"] for manifest in others}
    )


def is_valid(manifests: Sequence[Manifest], directory: Path) -> bool:
    """Checks all manifests strictly, also the templates of the RayCluster's pods."""
    (cluster,) = of_kind(manifests, "RayCluster")
    templates = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
        for name, template in pod_templates(manifests).items()
    ]
    known = [manifest for manifest in manifests if manifest is not cluster] + templates
    (directory / "known.yaml").write_text(yaml.safe_dump_all(known))
    (directory / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return passes(tool("kubernetes-validate"), "--strict", directory / "known.yaml") & passes(
        tool("check-jsonschema"), "--schemafile", SCHEMA, directory / "cluster.yaml"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_follow_the_schemas(variant: str, tmp_path: Path) -> None:
    assert is_valid(render(VARIANTS[variant]), tmp_path)


def test_misspelt_fields_are_found(tmp_path: Path) -> None:
    for change in (
        lambda manifests: of_kind(manifests, "RayCluster")[0]["spec"].update(workerGroups=[]),
        lambda manifests: pod_templates(manifests)["gpu"]["spec"].update(toleration=[]),
        lambda manifests: of_kind(manifests, "NetworkPolicy")[0]["spec"].update(egres=[]),
    ):
        manifests = render({})
        change(manifests)
        assert not is_valid(manifests, tmp_path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"config": {"state_dir": "/elsewhere"}}, "config"),
        ({"postgresql": {"enabled": False}}, "secrets.database"),
        ({"rayCluster": {"groups": []}}, "groups"),
        ({"replica": 1}, "replica"),
    ],
)
def test_impossible_values_are_refused(values: Mapping[str, Any], reason: str) -> None:
    answer = helm(values)
    assert reason in answer["error"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_have_no_privileges_and_no_token_of_the_cluster(variant: str) -> None:
    for name, template in pod_templates(render(VARIANTS[variant])).items():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"], name
        for container in pod["containers"] + pod.get("initContainers", []):
            security = container["securityContext"]
            assert not security["allowPrivilegeEscalation"] and security["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in container["resources"]["limits"], name


def test_volumes_are_mounted_and_secrets_are_only_named() -> None:
    manifests = render(VARIANTS["everything"])
    assert not of_kind(manifests, "Secret")
    for name, template in pod_templates(manifests).items():
        pod = template["spec"]
        mounted = {mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod["volumes"]}, name
    ray = pod_templates(manifests)["train"]["spec"]
    assert ray["volumes"][0] == {"name": "state", "persistentVolumeClaim": {"claimName": "shared"}}
    assert ray["containers"][0]["envFrom"] == [{"secretRef": {"name": "house-s3"}}]
    assert ray["containers"][0]["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 8}


def test_the_configuration_has_options_that_the_server_knows() -> None:
    for variant in ("default", "everything"):
        (config,) = of_kind(render(VARIANTS[variant]), "ConfigMap")
        options = tomllib.loads(config["data"]["trainhouse.toml"])
        assert options["base_models"] == ["Qwen/Qwen3-0.6B"] and set(options) <= set(OPTIONS) | {"base_models"}
    assert options["checkpoints"] == "s3://bucket/house"


def test_policies_and_budgets_select_pods_that_exist() -> None:
    manifests = render(VARIANTS["everything"] | {"postgresql": {"enabled": True}})
    pods = [template["metadata"]["labels"] for template in pod_templates(manifests).values()]
    policies = [each["spec"]["podSelector"] for each in of_kind(manifests, "NetworkPolicy")]
    budgets = [each["spec"]["selector"] for each in of_kind(manifests, "PodDisruptionBudget")]
    services = [{"matchLabels": each["spec"]["selector"]} for each in of_kind(manifests, "Service")]
    for selector in [*policies, *budgets, *services]:
        assert any(selector["matchLabels"].items() <= labels.items() for labels in pods), selector
    for labels in pods:
        assert sum(policy["matchLabels"].items() <= labels.items() for policy in policies) == 1, labels
    hosts = {
        each["metadata"]["name"]: each["spec"].get("minAvailable") for each in of_kind(manifests, "PodDisruptionBudget")
    }
    assert hosts["house-ray-train"] == 4 and hosts["house-ray-head"] == 1


def test_versions_are_those_of_this_checkout() -> None:
    chart, values = (yaml.safe_load((CHART / name).read_text()) for name in ("Chart.yaml", "values.yaml"))
    assert chart["version"] == chart["appVersion"] == __version__
    locked = (DEPLOY / "requirements.lock").read_text().split()
    assert f"ray=={values['rayCluster']['rayVersion']}" in locked
