"""The examples for containers: their stack is valid, and sizes, paths and times agree with each other."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples import vllm_offline
from tiering.api.units import parse_size
from tiering.config.stack_file import StackConfig, load_stack

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "deploy" / "kubernetes" / "vllm.yaml"
MONITORING = ROOT / "deploy" / "kubernetes" / "monitoring.yaml"
MACHINE = ROOT / "deploy" / "kubernetes" / "machine.yaml"
KUBERNETES = "1.33"
"""Version of Kubernetes whose schemas validate the manifests."""
DOCKERFILE = ROOT / "deploy" / "container" / "Dockerfile"


def resources() -> list[dict[str, Any]]:
    return [item for path in (MANIFEST, MONITORING) for item in yaml.safe_load_all(path.read_text())]


def manifests() -> dict[str, Any]:
    """Return the manifests by kind; of the two services, the one for clients."""
    return {item["kind"]: item for item in resources() if item["metadata"]["name"] != "vllm-pods"}


def size(quantity: str) -> int:
    return parse_size(f"{quantity}B")


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StackConfig:
    server = manifests()["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    for variable in server["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    path = tmp_path / "stack.yaml"
    path.write_text(manifests()["ConfigMap"]["data"]["stack.yaml"])
    return load_stack(path)


def test_memory_disk_and_times_of_the_pod_exceed_those_of_its_stack(stack: StackConfig) -> None:
    spec = manifests()["StatefulSet"]["spec"]
    pod = spec["template"]["spec"]
    (server,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    shm = size(volumes["shm"]["emptyDir"]["sizeLimit"])
    assert stack.primary.capacity < shm < size(server["resources"]["limits"]["memory"])
    (claim,) = spec["volumeClaimTemplates"]
    (local,) = (tier for tier in stack.secondary if tier.type == "local")
    assert local.capacity_bytes is not None
    assert local.capacity_bytes < 0.95 * size(claim["spec"]["resources"]["requests"]["storage"])
    timeout = next(int(word.partition("=")[2]) for word in server["args"] if word.startswith("--shutdown-timeout"))
    assert stack.shutdown_deadline < timeout < pod["terminationGracePeriodSeconds"]


def test_volumes_are_mounted_where_the_stack_and_the_server_look(stack: StackConfig) -> None:
    pod = manifests()["StatefulSet"]["spec"]["template"]["spec"]
    (server,), (check,) = pod["containers"], pod["initContainers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"
    assert mounts["nvme"] in {getattr(tier, "path", None) for tier in stack.secondary}
    config = json.loads(server["args"][server["args"].index("--kv-transfer-config") + 1])
    path = f"{mounts['stack']}/stack.yaml"
    assert config == vllm_offline.transfer_config(path)
    assert path in check["command"][-1]
    assert check["volumeMounts"] == server["volumeMounts"]


BUILT_IN = [item for item in (*resources(), *yaml.safe_load_all(MACHINE.read_text())) if "." not in item["apiVersion"]]
"""Resources of Kubernetes itself; schemas of others are not in the package."""


@pytest.mark.parametrize("resource", BUILT_IN, ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_a_manifest_obeys_the_schema_of_kubernetes(resource: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="a package of the extra dev")
    schemas.validate(resource, KUBERNETES, strict=True)
    broken = {**resource, "metadata": {**resource["metadata"], "lables": {}}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(broken, KUBERNETES, strict=True)


def test_services_and_monitor_select_the_pods_and_their_port() -> None:
    pods = manifests()["StatefulSet"]["spec"]
    labels = pods["template"]["metadata"]["labels"]
    (port,) = pods["template"]["spec"]["containers"][0]["ports"]
    services = [item for item in resources() if item["kind"] == "Service"]
    (headless,) = (item["metadata"]["name"] for item in services if item["spec"].get("clusterIP") == "None")
    assert pods["serviceName"] == headless
    for service in services:
        assert service["spec"]["selector"].items() <= labels.items()
        (offered,) = service["spec"]["ports"]
        assert (offered["targetPort"], offered["port"]) == (port["name"], port["containerPort"])
    monitor = manifests()["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")


def test_the_token_comes_from_a_secret_that_may_be_missing() -> None:
    variables = {
        item["name"]: item for item in manifests()["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    token = variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert token["optional"] is True
    guide = (ROOT / "docs" / "guides" / "containers.md").read_text()
    assert f"kubectl create secret generic {token['name']} --from-literal={token['key']}=" in guide


def test_the_image_has_the_extras_that_the_tiers_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"kv-tiering\[([\w,]+)\]", DOCKERFILE.read_text())
    assert {"cli", "object", "s3"} <= set(named.split(",")) <= extras.keys()
