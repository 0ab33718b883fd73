"""The composition of vLLM, Prometheus and Grafana: files exist, the stack loads, sizes and times fit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.vllm_offline import transfer_config
from tests.deploy.observed import ALERTS, ROOT, needs
from tiering.config.stack_file import load_stack

FOLDER = ROOT / "deploy" / "container"
SERVICES: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
SERVER: dict[str, Any] = SERVICES["vllm"]


def default(text: str) -> str:
    """Return the default of a reference to the environment, or ``text`` if there is none."""
    found = re.fullmatch(r"\$\{\w+:-(.*)\}", text)
    return found[1] if found else text


def test_the_stack_fits_the_memory_the_volumes_and_the_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVER["environment"].items():
        monkeypatch.setenv(name, default(value))
    stack = load_stack(FOLDER / "stack.yaml")
    assert stack.primary.capacity < int(default(SERVER["shm_size"]).removesuffix("g")) << 30
    mounted = {volume.split(":")[1] for volume in SERVER["volumes"]}
    assert {getattr(tier, "path", "") for tier in stack.secondary} <= mounted
    timeout = next(int(word.partition("=")[2]) for word in SERVER["command"] if word.startswith("--shutdown-timeout"))
    assert stack.shutdown_deadline < timeout < int(SERVER["stop_grace_period"].removesuffix("s"))


def test_the_server_gets_the_connector_and_the_mounted_stack() -> None:
    command = SERVER["command"]
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    path = config["kv_connector_extra_config"]["config"]
    assert config == transfer_config(path)
    assert f"./stack.yaml:{path}:ro" in SERVER["volumes"]


def test_what_is_mounted_and_built_exists_and_ports_are_local() -> None:
    assert SERVICES.keys() == {"vllm", "prometheus", "grafana"}
    mounted = [volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]]
    assert [path for path in mounted if path.startswith(".") and not (FOLDER / path).exists()] == []
    assert (FOLDER / SERVER["build"]["context"] / SERVER["build"]["dockerfile"]).exists()
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service["ports"])
    place = yaml.safe_load((FOLDER / "grafana-dashboards.yaml").read_text())["providers"][0]["options"]["path"]
    assert f"../grafana:{place}:ro" in SERVICES["grafana"]["volumes"]


def test_prometheus_scrapes_the_server_with_the_rules(tmp_path: Path) -> None:
    program = needs("promtool")
    shutil.copy(ALERTS, tmp_path)
    path = Path(shutil.copy(FOLDER / "prometheus.yaml", tmp_path))
    done = subprocess.run([program, "check", "config", str(path)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    (target,) = yaml.safe_load(path.read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert SERVICES[name]["ports"] == [f"127.0.0.1:{port}:{port}"]
