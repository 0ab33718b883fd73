"""The examples of a machine's service: the unit, and the DaemonSet."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_containers import MACHINE as MANIFEST
from tiering.cli.serve import check_service, serve
from tiering.config.stack_file import StackConfig, load_stack
from tiering.machine.service import IDLE_SECONDS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "kv-tiering.service"


def unit() -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return dict(parser["Service"])


def resource(kind: str) -> dict[str, Any]:
    (found,) = [item for item in yaml.safe_load_all(MANIFEST.read_text()) if item["kind"] == kind]
    return dict(found)


def pod() -> dict[str, Any]:
    return dict(resource("DaemonSet")["spec"]["template"]["spec"])


def options_of(words: list[str]) -> dict[str, Any]:
    """Return the options of a command line that runs the service."""
    assert words[0] == "serve"
    return dict(serve.make_context("serve", words[1:]).params)


def stacks(monkeypatch: pytest.MonkeyPatch) -> tuple[StackConfig, StackConfig]:
    """Return the stacks of the service and of its engines."""
    monkeypatch.setenv("KV_BUCKET", "kv-cache")
    data = resource("ConfigMap")["data"]
    return load_stack(yaml.safe_load(data["service.yaml"])), load_stack(yaml.safe_load(data["stack.yaml"]))


def test_the_unit_starts_the_service_in_a_directory_of_its_user() -> None:
    service = unit()
    program, *words = shlex.split(service["ExecStart"])
    options = options_of(words)
    assert Path(program).name == "kv-tiering"
    assert options["path"] == Path("/run") / service["RuntimeDirectory"] / "cache.sock"
    assert int(service["RuntimeDirectoryMode"], 8) == 0o750
    assert options["metrics"].startswith("127.0.0.1:")
    assert service["ExecReload"].split()[1:] == ["-USR2", "$MAINPID"]


def test_the_units_times_leave_room_for_the_service() -> None:
    service = unit()
    assert service["Type"] == "notify"
    assert float(service["WatchdogSec"]) > 10 * IDLE_SECONDS
    default = StackConfig.model_fields["shutdown_deadline"].default
    assert default < float(service["TimeoutStopSec"])


def test_the_service_and_the_engines_of_a_node_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    service, engine = stacks(monkeypatch)
    check_service("service.yaml", service)
    assert engine.machine is not None
    assert list(engine.machine.tiers) == [tier.tier_name for tier in service.secondary]
    assert engine.primary.capacity <= service.primary.capacity
    (container,) = pod()["containers"]
    options = options_of(container["args"])
    assert str(options["path"]) == engine.machine.socket
    assert options["metrics"].endswith(f":{container['ports'][0]['containerPort']}")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(options["path"].parent) == mounts["run"]
    assert mounts["nvme"] == getattr(service.secondary[0], "path", None)
    assert container["args"][1] == f"{mounts['stack']}/service.yaml"
    assert service.shutdown_deadline < pod()["terminationGracePeriodSeconds"]
